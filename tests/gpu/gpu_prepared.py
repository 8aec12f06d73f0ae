"""Kernels compiled, and the host's answers computed, before a GPU is at hand: a short lease should not pay for them.

A folder of ``prepare.py`` holds an image for each kernel, by name, and the host's results. It is good for the sources
that it was made from, and for no others.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from instrumentation.kernel import cuda_image

if TYPE_CHECKING:
    from instrumentation.kernel import Kernel


@cache
def folder() -> Path | None:
    """The folder that ``PREPARED`` names, if it does."""
    named = os.environ.get("PREPARED")
    return Path(named) if named else None


def image_file(place: Path, kernel: Kernel, *, checked: bool = False) -> Path:
    """Where a kernel's image is."""
    return place / "images" / f"{kernel.name}{'.checked' if checked else ''}.cuda"


def use() -> None:
    """Let every kernel that has an image be loaded from it; the others are compiled as usual."""
    place = folder()
    if place is None:
        return
    usual = cuda_image.image_path

    def image_path(kernel: Kernel, capability: tuple[int, int], *, checked: bool = False) -> Path:
        prepared = image_file(place, kernel, checked=checked)
        return prepared if prepared.exists() else usual(kernel, capability, checked=checked)

    cuda_image.image_path = image_path


@cache
def answers(name: str) -> dict[str, Any] | None:
    """Arrays of ``name``.npz, or None when nothing was prepared."""
    place = folder()
    if place is None or not (place / f"{name}.npz").exists():
        return None
    with np.load(place / f"{name}.npz") as held:
        return {key: held[key] for key in held.files}
