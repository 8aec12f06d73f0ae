"""PTX without a GPU. These tests fail when the toolkit's compiler is missing: they never skip."""

import re

import pytest
from kernel_source import load_module
from sample_kernels import arg_max, bits, calls, collectives_inside, halves, tiled_product

from instrumentation.errors import DeviceError

CAPABILITIES = [(8, 0), (9, 0)]
KERNELS = [
    (tiled_product, [r"fma\.rn\.f32", r"bar\.sync", r"\.shared"]),
    (arg_max, [r"shfl\.sync\.bfly", r"bar\.sync"]),
    (calls, [r"fma\.rn\.f32", r"st\.global"]),
    (collectives_inside, [r"shfl\.sync\.bfly", r"bar\.sync"]),
    (halves, [r"cvt\.f32\.f16", r"cvt\.rn\.f16\.f32", r"shl\.b32"]),
    (bits, [r"shr\.u32|bfe\.u32|bfe\.s32", r"and\.b32"]),
]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize(("kernel", "instructions"), KERNELS, ids=lambda k: getattr(k, "name", ""))
def test_ptx(kernel, instructions, capability):
    text = kernel.ptx(capability)
    assert f".target sm_{capability[0]}{capability[1]}" in text
    assert re.search(rf"\.visible \.entry \S*{kernel.name}", text)
    for instruction in instructions:
        assert re.search(instruction, text), f"{instruction} is not in the PTX of {kernel.name}"


def test_a_capability_that_the_compiler_does_not_know():
    with pytest.raises(DeviceError, match=r"tiled_product: no PTX for compute capability 1\.0: "):
        tiled_product.ptx((1, 0))


def test_constants_are_those_of_the_decoration(tmp_path):
    source = "SIZE = 1234\n@kernel(block=32)\ndef k(y: i32_1d) -> None:\n    y[cuda.threadIdx.x] = SIZE\n"
    module = load_module(tmp_path / "constant.py", source)
    module.SIZE = 4321
    assert "1234" in module.k.ptx((8, 0))
    assert "1234" in module.k.host().path.read_text(encoding="utf-8")
