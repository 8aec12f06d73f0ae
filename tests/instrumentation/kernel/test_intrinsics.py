import numpy as np
from kernel_runner import run_all
from sample_kernels import bits, halves

from instrumentation.kernel.intrinsics import (
    bf16_to_f32,
    bit_field,
    f16_to_f32,
    f32_bits,
    f32_from_bits,
    f32_to_f16,
)


def test_every_half_converts_as_numpy_does():
    h = np.arange(65536, dtype=np.uint16)
    rng = np.random.default_rng(0)
    f = (rng.standard_normal(65536) * 10.0 ** rng.integers(-12, 6, 65536)).astype(np.float32)
    outputs = [np.zeros(65536, np.float32), np.zeros(65536, np.float32), np.zeros(65536, np.uint16)]
    *_, wide, brain, narrow = run_all(halves, 1024, h, f, *outputs, 65536)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(wide, h.view(np.float16).astype(np.float32))
        np.testing.assert_array_equal(wide, f16_to_f32(h))
        np.testing.assert_array_equal(brain, (h.astype(np.uint32) << 16).view(np.float32))
        np.testing.assert_array_equal(brain, bf16_to_f32(h))
        np.testing.assert_array_equal(narrow, f.astype(np.float16).view(np.uint16))
        np.testing.assert_array_equal(narrow, f32_to_f16(f))


def test_bits():
    rng = np.random.default_rng(0)
    f, b = rng.standard_normal(32).astype(np.float32), rng.integers(0, 256, 32).astype(np.uint8)
    w = rng.integers(0, 2**32, 32).astype(np.uint32)
    outputs = [np.zeros(32, np.int32), np.zeros(32, np.float32), np.zeros(96, np.int32)]
    *_, as_bits, back, fields = run_all(bits, 1, f, b, w, *outputs)
    np.testing.assert_array_equal(as_bits, f32_bits(f))
    np.testing.assert_array_equal(back, f32_from_bits(f.view(np.int32) ^ 1))
    np.testing.assert_array_equal(fields[:32], b >> 4)
    np.testing.assert_array_equal(fields[:32], bit_field(b, 4, 15))
    np.testing.assert_array_equal(fields[32:64], [(int(v) >> k) & 255 for k, v in enumerate(w)])
    np.testing.assert_array_equal(fields[64:], bit_field(f.view(np.int32), 23, 255))
