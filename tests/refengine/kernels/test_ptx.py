"""Every kernel in every specialisation becomes PTX for two architectures, on a machine without a GPU."""

from __future__ import annotations

import pytest

from refengine.kernels import all_kernels

KERNELS = {kernel.name: kernel for kernel in all_kernels()}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles_to_ptx(name, capability):
    text = KERNELS[name].ptx(capability)
    assert f".target sm_{capability[0]}{capability[1]}" in text
    assert ".visible .entry" in text
    # Exact float32 arithmetic everywhere: a float64 operation would be 64 times slower and round differently.
    assert ".f64" not in text.replace("cvt.rn.f32.f64", "")


def test_names_are_unique():
    assert len(KERNELS) == len(list(all_kernels()))
