"""Kernels that several tests run or compile."""

import numpy as np
from numba import cuda, float32, int32

from instrumentation.kernel import device_function, intrinsics, kernel
from instrumentation.kernel.intrinsics import bit_field, f16_to_f32, f32_bits, f32_from_bits, f32_to_f16
from instrumentation.kernel.types import f32_1d, f32_2d, i32, i32_1d, u8_1d, u16_1d, u32_1d

FULL = 0xFFFFFFFF
SCALE = 3
TILE = 8


@kernel(block=(TILE, TILE), strict=True)
def tiled_product(a: f32_2d, b: f32_2d, c: f32_2d) -> None:
    left = cuda.shared.array((TILE, TILE), float32)
    right = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.grid(2)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    total = float32(0)
    for part in range((a.shape[1] + TILE - 1) // TILE):
        k = part * TILE
        inside = y < a.shape[0] and k + tx < a.shape[1]
        left[ty, tx] = a[y, k + tx] if inside else float32(0)
        inside = x < b.shape[1] and k + ty < b.shape[0]
        right[ty, tx] = b[k + ty, x] if inside else float32(0)
        cuda.syncthreads()
        for j in range(TILE):
            total = cuda.fma(left[ty, j], right[j, tx], total)
        cuda.syncthreads()
    if y < c.shape[0] and x < c.shape[1]:
        c[y, x] = total


@device_function
def warp_max(v):
    for o in (16, 8, 4, 2, 1):
        v = max(v, cuda.shfl_xor_sync(FULL, v, o))
    return v


@kernel(block=128)
def arg_max(x: f32_2d, best: f32_1d, where: i32_1d) -> None:
    values = cuda.shared.array(4, float32)
    places = cuda.shared.array(4, int32)
    t = cuda.threadIdx.x
    row = cuda.blockIdx.x
    value = float32(-np.inf)
    place = 2147483647
    for i in range(t, x.shape[1], 128):
        if x[row, i] > value:
            value = x[row, i]
            place = i
    top = warp_max(value)
    if value < top:
        place = 2147483647
    for o in (16, 8, 4, 2, 1):
        place = min(place, cuda.shfl_xor_sync(FULL, place, o))
    if t & 31 == 0:
        values[t >> 5] = top
        places[t >> 5] = place
    cuda.syncthreads()
    if t == 0:
        for w in range(1, 4):
            if values[w] > values[0] or (values[w] == values[0] and places[w] < places[0]):
                values[0] = values[w]
                places[0] = places[w]
        best[row] = values[0]
        where[row] = places[0]


@device_function
def clamp(v, low, high):
    if v < low:
        return low
    if v > high:
        return high
    return v


@device_function
def dot_row(matrix, row, vector):
    total = float32(0)
    for k in range(matrix.shape[1]):
        total = cuda.fma(matrix[row, k], vector[k], total)
        if total > float32(1000):
            return float32(1000)
    return total


@device_function
def add_to(target, i, v):
    if i < target.shape[0]:
        target[i] += v * SCALE


@device_function
def nested(matrix, row, vector, out, i):
    add_to(out, i, clamp(dot_row(matrix, row, vector), float32(-50), float32(50)))


@kernel(block=32)
def calls(matrix: f32_2d, vector: f32_1d, out: f32_1d) -> None:
    i = cuda.grid(1)
    row = i % matrix.shape[0]
    nested(matrix, row, vector, out, i)
    if i < out.size:
        out[i] -= dot_row(matrix, row, vector)


@device_function
def fill(tile, t, v):
    tile[t, 1] = v
    tile[t, 0] = v * 2


@device_function
def mirror(tile, t):
    cuda.syncthreads()
    return tile[tile.shape[0] - 1 - t, 0] + tile[t, 1]


@device_function
def warp_sum(v):
    for o in (16, 8, 4, 2, 1):
        v += cuda.shfl_xor_sync(FULL, v, o)
    return v


@device_function
def block_sum(v):
    parts = cuda.shared.array(32, int32)
    lane = cuda.laneid
    warp = cuda.threadIdx.x >> 5
    own = warp_sum(v)
    if lane == 0:
        parts[warp] = own
    cuda.syncthreads()
    total = 0
    for w in range(cuda.blockDim.x >> 5):
        total += parts[w]
    cuda.syncthreads()
    return total


@device_function
def store_global(y, v):
    y[cuda.grid(1)] = v


@kernel(block=96)
def collectives_inside(x: i32_1d, y: i32_1d, z: i32_1d, rounds: i32) -> None:
    tile = cuda.shared.array((96, 2), int32)
    t = cuda.threadIdx.x
    v = x[t]
    fill(tile, t, v)
    both = mirror(tile, t)
    total = 0
    for k in range(rounds):
        total += block_sum(v + k) - block_sum(k * t)
    lane = warp_sum(v)  # a name that the helper uses too
    store_global(y, both + lane)
    z[t] = total


@kernel(block=64, strict=True)
def halves(h: u16_1d, f: f32_1d, wide: f32_1d, brain: f32_1d, narrow: u16_1d, n: i32) -> None:
    i = cuda.grid(1)
    if i < n:
        wide[i] = f16_to_f32(h[i])
        brain[i] = intrinsics.bf16_to_f32(h[i])
        narrow[i] = f32_to_f16(f[i])


@kernel(block=32, strict=True)
def bits(f: f32_1d, b: u8_1d, w: u32_1d, as_bits: i32_1d, back: f32_1d, fields: i32_1d) -> None:
    t = cuda.threadIdx.x
    raw = f32_bits(f[t])
    as_bits[t] = raw
    back[t] = f32_from_bits(raw ^ 1) + float32(0)
    fields[t] = bit_field(b[t], 4, 15)
    fields[t + 32] = bit_field(w[t], t, 255)
    fields[t + 64] = bit_field(raw, 23, 255)
