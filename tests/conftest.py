"""Settings of the whole test run."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent

# Compiled kernels stay beside the checkout, so that a second run starts at once.
os.environ.setdefault("REFENGINE_CACHE_DIR", str(ROOT / ".cache"))

# What somebody set for the commands that they run is nothing that a test asks for.
_OF_TESTS = ("REFENGINE_CACHE_DIR", "REFENGINE_FUZZ_", "REFENGINE_UPDATE_GOLDEN")
for _name in [
    name for name in os.environ if name.startswith("REFENGINE_") and not name.startswith(_OF_TESTS)
]:
    del os.environ[_name]

# A run in the background starts with Ctrl-C ignored; tests that press it want what a terminal has.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A first example may compile a kernel: time says nothing here.
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("random"), derandomize=True)
settings.register_profile("deep", settings.get_profile("random"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "random"))

# tests/gpu needs a CUDA device: run it there by name.
collect_ignore = ["gpu"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Kernels and cases of the whole run stay to its end: look for no garbage among their millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def usual_logs() -> Iterator[None]:
    """A test that configures logs, as commands do, does so for itself alone: others read every line."""
    yield
    structlog.reset_defaults()
