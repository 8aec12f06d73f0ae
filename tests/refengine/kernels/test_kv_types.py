"""Element types of the cache: their extents, what they refuse, and the NumPy emulation that tests of kernels use."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_cells import TYPES, decoded, encoded

from instrumentation.errors import BadInputError
from refengine.kernels.kv_types import KV_TYPES, PAGE, CacheType, check_cache_type, check_head_dim

BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}


@pytest.mark.parametrize("name", TYPES)
@given(n_pages=st.integers(1, 9), n_head_kv=st.integers(1, 9), blocks=st.integers(1, 9))
def test_shapes_have_the_bytes_of_the_type(name: CacheType, n_pages: int, n_head_kv: int, blocks: int):
    kind, extents = KV_TYPES[name], (n_pages, n_head_kv, 32 * blocks)
    assert kind.fits(32 * blocks)
    wanted = n_pages * n_head_kv * 32 * blocks * PAGE * BYTES[name]
    for shape in (kind.keys(*extents), kind.values(*extents)):
        assert np.prod(shape) * kind.dtype.itemsize == kind.nbytes(*extents) == wanted
    row = np.zeros(32 * blocks, np.float32)
    assert encoded(name, row).shape == (kind.row(32 * blocks),)
    assert encoded(name, row).dtype == kind.dtype


def test_every_name_is_its_type():
    assert tuple(KV_TYPES) == TYPES
    assert [check_cache_type("cache_type_k", name) for name in TYPES] == list(TYPES)


@pytest.mark.parametrize("name", ["", "F16", "q4_0", "f64"])
def test_an_unknown_type_is_refused_by_name(name: str):
    message = f"^cache_type_v '{name}' is unknown; use one of f32, f16, bf16, q8_0$"
    with pytest.raises(BadInputError, match=message):
        check_cache_type("cache_type_v", name)


@pytest.mark.parametrize("head_dim", [16, 80, 33])
def test_rows_that_are_no_whole_blocks_are_refused(head_dim: int):
    message = f"^cache_type_k q8_0: .*blocks of 32, .*have {head_dim} elements; use one of f32, f16, bf16$"
    with pytest.raises(BadInputError, match=message):
        check_head_dim("cache_type_k", "q8_0", head_dim)
    assert not KV_TYPES["q8_0"].fits(head_dim)
    with pytest.raises(AssertionError):
        KV_TYPES["q8_0"].row(head_dim)
    for name in ("f32", "f16", "bf16"):
        check_head_dim("cache_type_k", name, head_dim)


# --- the emulation


@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-120, 15))
def test_q8_0_is_that_of_gguf(seed: int, exponent: int):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((3, 64)) * 2.0**exponent).astype(np.float32)
    found, wanted = encoded("q8_0", x), gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
    blocks = wanted.reshape(3, 2, 34)
    np.testing.assert_array_equal(found[:, :64], blocks[..., 2:].reshape(3, 64))
    np.testing.assert_array_equal(found[:, 64:], blocks[..., :2].reshape(3, 4))
    values = gguf.quants.dequantize(wanted, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(decoded("q8_0", found), values)


@given(seed=st.integers(0, 2**32 - 1))
def test_bf16_is_that_of_gguf(seed: int):
    x = np.random.default_rng(seed).standard_normal((3, 64)).astype(np.float32)
    wanted = gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16)
    np.testing.assert_array_equal(encoded("bf16", x).view(np.uint8).reshape(wanted.shape), wanted)


def test_q8_0_of_zeros_is_zero():
    assert not encoded("q8_0", np.zeros((1, 32), np.float32)).any()
