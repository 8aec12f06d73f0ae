"""Settings of the whole test run."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# Compiled kernels stay beside the checkout, so that a second run starts at once.
os.environ.setdefault("REFENGINE_CACHE_DIR", str(ROOT / ".cache"))

# A first example may compile a kernel: time says nothing here.
settings.register_profile("ci", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", settings.get_profile("ci"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# tests/gpu needs a CUDA device: run it there by name.
collect_ignore = ["gpu"]
