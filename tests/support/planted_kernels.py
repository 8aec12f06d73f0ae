"""Kernels whose arguments decide whether they stay inside: faults are planted without compiling one for each.

A comment ``# at: name`` marks the line that a fault is to be reported at.
"""

from pathlib import Path

from numba import boolean, cuda, float32, float64, int32

from instrumentation.kernel import device_function, kernel
from instrumentation.kernel.types import (
    f32_1d,
    f32_2d,
    f32_3d,
    f64_1d,
    i32,
    i32_1d,
    i64_4d,
    u8_1d,
    u16_1d,
    u64,
)

N_TILE = 64


def line_at(mark: str) -> int:
    """Line of this file that carries a mark."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    [found] = [i + 1 for i, line in enumerate(lines) if line.endswith(f"# at: {mark}")]
    return found


@kernel(block=32)
def shifted(x: f32_1d, y: f32_1d, n: i32, load_at: i32, store_at: i32) -> None:
    i = cuda.grid(1)
    if i < n:
        value = x[i + load_at]  # at: load
        y[i + store_at] = value  # at: store


@kernel(block=(8, 4))
def matrix(a: f32_2d, b: f32_2d, rows: i32, columns: i32, row_at: i32, column_at: i32) -> None:
    column, row = cuda.grid(2)
    if row < rows and column < columns:
        b[row, column] = a[row + row_at, column + column_at]  # at: matrix
        b[row, column] += float32(1)


@kernel(block=4)
def deep(a: f32_3d, b: i64_4d, i: i32, j: i32, k: i32, m: i32) -> None:
    t = cuda.threadIdx.x
    if t == 2:
        value = a[i, j, k]  # at: three axes
        b[i, j, k, m] = int32(value)  # at: four axes


@kernel(block=N_TILE)
def tiles(y: f32_1d, load_at: i32, store_at: i32, row: i32, column: i32, own_at: i32, filled: i32) -> None:
    tile = cuda.shared.array(N_TILE, float32)
    table = cuda.shared.array((4, 8), float32)
    own = cuda.local.array(3, float32)
    t = cuda.threadIdx.x
    if t < 32:
        table[t // 8, t % 8] = float32(t)
    if t < filled:
        tile[t + store_at] = float32(t)  # at: shared store
    for k in range(3):
        if t < filled:
            own[k] = float32(k)
    cuda.syncthreads()
    value = tile[t + load_at]  # at: shared load
    value += table[row, column]  # at: table
    value += own[own_at]  # at: local
    y[t] = value


@device_function
def element(values, i):
    return values[i]  # at: element


@device_function
def pair(values, i):
    return element(values, i) + element(values, i + 1)  # at: pair


@device_function
def put(values, i, v):
    values[i] = v  # at: put


@device_function
def from_table(i):
    table = cuda.local.array(4, float32)
    for k in range(4):
        table[k] = float32(k)
    return table[i]  # at: table of a function


@device_function
def neighbour(tile, v, step):
    t = cuda.threadIdx.x
    tile[t] = v
    cuda.syncthreads()
    return tile[t + step]  # at: neighbour


@kernel(block=32)
def calls(x: f32_1d, z: f32_1d, y: f32_1d, x_at: i32, z_at: i32, y_at: i32, table_at: i32, step: i32) -> None:
    tile = cuda.shared.array(33, float32)
    t = cuda.threadIdx.x
    if t == 0:
        tile[32] = float32(0)
    first = pair(x, t + x_at)  # at: call of x
    second = element(z, t + z_at)  # at: call of z
    beside = neighbour(tile, first, step)  # at: call of neighbour
    put(y, t + y_at, beside + second + from_table(table_at))  # at: call of y


@kernel(block=32)
def counters(h: i32_1d, f: f64_1d, at: i32, f_at: i32, shared_at: i32, how: i32) -> None:
    s = cuda.shared.array(4, int32)
    t = cuda.threadIdx.x
    if t < 4:
        s[t] = 0
    cuda.syncthreads()
    if t == 5:
        if how == 0:
            cuda.atomic.add(h, at, 1)  # at: add
        elif how == 1:
            cuda.atomic.cas(h, at, 0, 1)  # at: cas
        elif how == 2:
            cuda.atomic.exch(h, at, 1)  # at: exch
        elif how == 3:
            cuda.atomic.min(f, f_at, float64(-1))  # at: min
        elif how == 4:
            cuda.atomic.add(s, shared_at, 1)  # at: shared add
        elif how == 5:
            h[at] += 1  # at: augmented
    cuda.syncthreads()
    if t < 4:
        h[t] = s[t]


@kernel(block=32)
def limited(limit: i32_1d, x: u16_1d, y: u8_1d, at: i32) -> None:
    n = limit[cuda.blockIdx.x + at]  # at: uniform
    k = cuda.threadIdx.x
    while k < n and x[k] > 0:  # at: while
        y[k] = 1  # at: bytes
        k += 32


@kernel(block=32)
def sums(x: f64_1d, y: f64_1d, n: i32) -> None:
    i = cuda.threadIdx.x
    if i < n:
        y[i] = x[i] + float64(1)  # at: sums


@kernel(block=32)
def five_axes(y: f32_1d, k: u64, m: i32) -> None:
    deep = cuda.shared.array((2, 2, 2, 2, 3), float32)
    flags = cuda.local.array(2, boolean)
    t = cuda.threadIdx.x
    flags[int32(t < 32)] = t == 0
    if t == 0:
        deep[0, 1, 0, 1, m] = float32(1)  # at: five axes
    if flags[k] and t == 0:  # at: flag
        y[k] = float32(1)  # at: unsigned


@device_function
def selected(x, i, n):
    cuda.syncwarp()
    value = x[i]  # unwritten: allowed
    return value if i < n else float32(0)


@kernel(block=32)
def selecting(x: f32_1d, y: f32_1d, n: i32, at: i32, unsaid: i32) -> None:
    i = cuda.threadIdx.x
    inlined = selected(x, i, n)
    value = element(x, i + at)  # unwritten: allowed
    value = value + x[i] if i < n else float32(0)  # unwritten: allowed
    if i < unsaid:
        value += x[i]  # at: unsaid
    y[i] = value + inlined
