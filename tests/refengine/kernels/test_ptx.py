"""Every kernel in every specialisation becomes PTX, on a machine without a GPU."""

from __future__ import annotations

import pytest

from refengine.kernels import all_kernels

KERNELS = {kernel.name: kernel for kernel in all_kernels()}
#: the first and the last kernel of each template: those for the host and for a GPU where there are both
ENDS = {
    kernel.name
    for kernels in (KERNELS.values(), reversed(KERNELS.values()))
    for kernel in {kernel.parsed.name: kernel for kernel in kernels}.values()
}
#: what the oldest architecture has, later ones have: for one of these NVVM is only given another name
EACH = [(name, (8, 0)) for name in KERNELS] + [(name, (9, 0)) for name in KERNELS if name in ENDS]


@pytest.mark.parametrize(
    ("name", "capability"), EACH, ids=lambda part: part if isinstance(part, str) else f"sm_{part[0]}{part[1]}"
)
def test_every_kernel_compiles_to_ptx(name, capability):
    text = KERNELS[name].ptx(capability)
    assert f".target sm_{capability[0]}{capability[1]}" in text
    assert ".visible .entry" in text
    # Exact float32 arithmetic everywhere: a float64 operation would be 64 times slower and round differently.
    assert ".f64" not in text.replace("cvt.rn.f32.f64", "")


def test_names_are_unique():
    assert len(KERNELS) == len(list(all_kernels()))
