"""Every format: what a kernel reads from a packed matrix has the bits of gguf's own dequantisation."""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import quants as gguf_quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda

from instrumentation.devices.host_driver import NO_RANGES, run_launches
from instrumentation.kernel import Kernel, kernel
from instrumentation.kernel.types import f32_2d, i32, u8_2d, u16_2d, u32_2d
from refengine.errors import UnsupportedModelError
from refengine.kernels import in_pairs
from refengine.kernels.quants import FORMATS, Packed, PackedShapes, QuantFormat, format_of
from refengine.kernels.quants.layout import LANES, UNUSED

NAMES = [f.name for f in FORMATS.values()]
BIG_BLOCKS = [f.name for f in FORMATS.values() if f.block_size > LANES]
#: bits of float16: zeros, subnormals, the least normal, the largest finite, one
EXTREMES = np.array([0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00], np.uint16)


def named(name: str) -> QuantFormat:
    return format_of(GGMLQuantizationType[name])


def finite(bits: npt.NDArray[Any], exponent: int) -> npt.NDArray[Any]:
    """Clear the lowest exponent bit where all are set, so that no bits are NaN or infinite."""
    return np.where(bits & exponent == exponent, bits & ~bits.dtype.type(exponent & -exponent), bits)


def random_raw(quant: QuantFormat, n_out: int, n_in: int, seed: int) -> npt.NDArray[np.uint8]:
    """Bytes of a matrix: all bits random, scales finite and often extreme."""
    rng = np.random.default_rng(seed)
    n_blocks = n_out * n_in // quant.block_size
    raw = rng.integers(0, 256, n_blocks * quant.block_bytes, np.uint8)
    blocks = raw.view(quant.block)
    for field in {"d", "m", "dmin"} & set(blocks.dtype.names or ()):
        random = finite(rng.integers(0, 2**16, n_blocks, np.uint16), 0x7C00)
        blocks[field] = np.where(rng.random(n_blocks) < 0.3, rng.choice(EXTREMES, n_blocks), random)
    if blocks.dtype.names is None:
        exponent = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}[quant.name]
        blocks[...] = finite(blocks, exponent)
    return raw


def pack(quant: QuantFormat, raw: npt.NDArray[np.uint8], n_out: int, n_in: int, fill: int = 0xAA) -> Packed:
    out = allocate(quant.packed_shapes(n_out, n_in), fill)
    quant.repack(raw, n_out, n_in, out)
    return out


def allocate(shapes: PackedShapes, fill: int) -> Packed:
    codes = np.full(shapes.codes, fill, np.uint8)
    return Packed(
        codes,
        np.full(shapes.halves, fill * 0x101, np.uint16),
        np.full(shapes.words, fill * 0x1010101, np.uint32),
    )


@functools.cache
def dequantise_kernel(name: str) -> Kernel:
    weight = named(name).weight

    @kernel(block=32, strict=True)
    def dequantise(codes: u8_2d, halves: u16_2d, words: u32_2d, values: f32_2d, n_blocks: i32) -> None:
        lane = cuda.threadIdx.x
        row = cuda.blockIdx.x
        for b in range(n_blocks):
            values[row, b * 32 + lane] = weight(codes, halves, words, row, b, lane)

    return dequantise


def dequantise(quant: QuantFormat, packed: Packed, n_out: int, n_in: int) -> npt.NDArray[np.float32]:
    values = np.full((n_out, n_in), np.nan, np.float32)
    slots = [n_out, 1, 1]
    for array in (packed.codes, packed.halves, packed.words, values):
        slots += [array.ctypes.data, *array.shape]
    arguments = np.array([*slots, n_in // LANES], np.int64)
    compiled = dequantise_kernel(quant.name).host()
    records = np.array([[compiled.address, arguments.ctypes.data, n_out, 0, 0, 1]], np.int64)
    assert run_launches(records, 0, 1, 1, NO_RANGES) == 1
    return values


def check_bits(quant: QuantFormat, n_out: int, n_in: int, seed: int) -> None:
    raw = random_raw(quant, n_out, n_in, seed)
    wanted = gguf_quants.dequantize(raw.reshape(n_out, -1), quant.type).reshape(n_out, n_in)
    assert np.isfinite(wanted).all()
    found = dequantise(quant, pack(quant, raw, n_out, n_in), n_out, n_in)
    np.testing.assert_array_equal(found.view(np.uint32), np.ascontiguousarray(wanted).view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n_out", "units"), [(1, 1), (1, 3), (3, 2), (2, 7), (4, 18)])
def test_kernel_reads_the_bits_of_gguf(name: str, n_out: int, units: int):
    quant = named(name)
    check_bits(quant, n_out, units * max(LANES, quant.block_size), seed=units)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(n_out=st.integers(1, 9), units=st.integers(1, 19), seed=st.integers(0, 2**32 - 1))
def test_kernel_reads_the_bits_of_gguf_whatever_the_shape(name: str, n_out: int, units: int, seed: int):
    quant = named(name)
    check_bits(quant, n_out, units * max(LANES, quant.block_size), seed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n_out", "units"), [(1, 1), (2, 1), (3, 5)])
def test_repack_writes_every_element(name: str, n_out: int, units: int):
    quant = named(name)
    n_in = units * max(LANES, quant.block_size)
    raw = random_raw(quant, n_out, n_in, seed=1)
    first, second = pack(quant, raw, n_out, n_in, fill=0xAA), pack(quant, raw, n_out, n_in, fill=0x55)
    assert first.shapes == quant.packed_shapes(n_out, n_in)
    np.testing.assert_array_equal(first.codes, second.codes)
    np.testing.assert_array_equal(first.halves, second.halves)
    np.testing.assert_array_equal(first.words, second.words)


@pytest.mark.parametrize("name", NAMES)
def test_rows_pack_alike_alone_and_in_a_matrix_of_many_chunks(name: str):
    quant = named(name)
    n_in = 512
    row_bytes = n_in // quant.block_size * quant.block_bytes
    n_out = 600_000 // row_bytes
    raw = random_raw(quant, n_out, n_in, seed=2)
    whole = pack(quant, raw, n_out, n_in)
    step = 2**18 // row_bytes
    for row in (0, step - 1, step, 2 * step - 1, 2 * step, n_out - 1):
        alone = pack(quant, raw[row * row_bytes : (row + 1) * row_bytes], 1, n_in)
        part = whole.rows(row, row + 1)
        np.testing.assert_array_equal(part.codes, alone.codes)
        np.testing.assert_array_equal(part.halves, alone.halves)
        np.testing.assert_array_equal(part.words, alone.words)


def test_a_half_empty_group_ends_in_zero_nibbles():
    quant = named("Q4_1")
    packed = pack(quant, random_raw(quant, 2, 96, seed=3), 2, 96)
    assert packed.codes.shape == (2, 64)
    assert (packed.codes[:, 32:] >> 4 == 0).all()
    assert (packed.codes[:, :32] >> 4 != 0).any()


@pytest.mark.parametrize(
    ("name", "n_in"),
    [
        (quant.name, n_in)
        for quant in FORMATS.values()
        for n_in in (512, 544, 576, 768, 1024, 1536, 4096)
        if n_in % quant.block_size == 0
    ],
)
def test_packed_is_about_as_large_as_the_file(name: str, n_in: int):
    quant = named(name)
    n_out = 1000
    raw_bytes = n_out * n_in // quant.block_size * quant.block_bytes
    assert raw_bytes <= quant.packed_shapes(n_out, n_in).nbytes <= 1.10 * raw_bytes


@pytest.mark.parametrize("name", NAMES)
def test_kernel_compiles_for_cuda_without_doubles(name: str):
    ptx = dequantise_kernel(name).ptx((9, 0))
    assert ".entry" in ptx
    assert ".f64" not in ptx


def test_a_type_that_is_not_built_is_named_with_the_known_ones():
    with pytest.raises(UnsupportedModelError, match=r"type TQ1_0 .* F32, F16, BF16, Q4_0, .*IQ4_XS"):
        format_of(GGMLQuantizationType.TQ1_0)
    with pytest.raises(UnsupportedModelError, match="type 4711 "):
        format_of(4711)


def test_every_format_has_its_own_type_and_block_size():
    for kind, quant in FORMATS.items():
        assert format_of(kind) is quant
        assert quant.type == kind
        assert (quant.block_size, quant.block_bytes) == GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n_out", "n_in"), [(1, 48), (1, 0), (0, 256), (-1, 256), (1, -256), (3, 257)])
def test_shapes_that_cannot_pack_are_refused(name: str, n_out: int, n_in: int):
    with pytest.raises(UnsupportedModelError, match=f"a {name} matrix of {n_out} rows of {n_in} weights"):
        named(name).packed_shapes(n_out, n_in)


@pytest.mark.parametrize("name", BIG_BLOCKS)
def test_rows_that_end_inside_a_super_block_are_refused(name: str):
    with pytest.raises(UnsupportedModelError, match="multiple of 256"):
        named(name).packed_shapes(4, 288)


@pytest.mark.parametrize("excess", [-1, 1, 20])
def test_raw_bytes_of_another_length_are_refused(excess: int):
    quant = named("Q4_1")
    out = allocate(quant.packed_shapes(2, 64), 0)
    raw = np.zeros(80 + excess, np.uint8)
    with pytest.raises(ValueError, match=rf"uint8 \[80\], not uint8 \[{80 + excess}\]"):
        quant.repack(raw, 2, 64, out)


def test_arrays_of_another_shape_are_refused():
    quant = named("Q4_1")
    with pytest.raises(ValueError, match="packs into"):
        quant.repack(np.zeros(80, np.uint8), 2, 64, allocate(quant.packed_shapes(2, 96), 0))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("codes", np.zeros((2, 32), np.int8)),
        ("codes", np.zeros(32, np.uint8)),
        ("halves", np.zeros((2, 4), np.uint16)[:, ::2]),
        ("words", np.zeros((2, 4), np.float32)),
    ],
)
def test_packed_refuses_arrays_that_kernels_cannot_take(name: str, array: npt.NDArray[Any]):
    arrays = {
        "codes": np.zeros(UNUSED, np.uint8),
        "halves": np.zeros(UNUSED, np.uint16),
        "words": np.zeros(UNUSED, np.uint32),
    }
    with pytest.raises(ValueError, match=f"{name} is {array.dtype} of shape"):
        Packed(**(arrays | {name: array}))


@pytest.mark.parametrize("n", range(1, 9))
def test_pairs_have_every_format_whatever_their_number(n):
    pairs = list(in_pairs(range(n)))
    assert pairs[0] == (0, 0)
    assert {each for pair in pairs for each in pair} == set(range(n))
    assert len(pairs) == 1 + n // 2
