"""Kernels in which threads of a block race, or do not meet, as their arguments say: no fault needs one of its own.

``repaired`` above 0 is the twin. A comment ``# at: name`` marks the line that a fault is to be reported at.
"""

from pathlib import Path

from numba import cuda, float32, int32

from instrumentation.kernel import device_function, kernel
from instrumentation.kernel.types import f32_1d, f32_2d, i32, i32_1d

FULL = 0xFFFFFFFF


def line_at(mark: str) -> int:
    """Line of this file that carries a mark."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    [found] = [i + 1 for i, line in enumerate(lines) if line.endswith(f"# at: {mark}")]
    return found


@kernel(block=64)
def neighbours(x: f32_1d, y: f32_1d, step: i32, repaired: i32, by_warp: i32) -> None:
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]  # at: neighbour is written
    if repaired > 0:
        cuda.syncthreads()
    if by_warp > 0:
        cuda.syncwarp()
    y[t] = tile[(t + step) % 64]  # at: neighbour is read


@kernel(block=64)
def moved(x: f32_1d, y: f32_1d, repaired: i32) -> None:
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    cuda.syncthreads()
    value = tile[(t + 40) % 64]  # at: read before it is overwritten
    if repaired > 0:
        cuda.syncthreads()
    tile[t] = value + float32(1)  # at: overwritten
    cuda.syncthreads()
    y[t] = tile[t]


@kernel(block=128)
def tree(x: f32_1d, y: f32_1d, from_half: i32, warps_from: i32) -> None:
    """Halves from ``from_half`` on are followed by a barrier, those from ``warps_from`` down by one of a warp alone."""
    sums = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    sums[t] = x[t]
    cuda.syncthreads()
    half = 64
    while half > 0:
        if t < half:
            sums[t] += sums[t + half]  # at: tree
        if half >= from_half:
            cuda.syncthreads()
        elif half <= warps_from:
            cuda.syncwarp()
        half = half // 2
    if t == 0:
        y[0] = sums[0]


@kernel(block=64)
def buffers(x: f32_2d, y: f32_1d, ahead: i32) -> None:
    """Two buffers in turn, of which the one that is read must not be the one that is filled."""
    tile = cuda.shared.array((2, 64), float32)
    t = cuda.threadIdx.x
    total = float32(0)
    tile[0, t] = x[0, t]
    tile[1, t] = float32(0)
    cuda.syncthreads()
    for k in range(x.shape[0] - 1):
        tile[(k + ahead) % 2, t] = x[k + 1, t]  # at: buffer is filled
        total += tile[k % 2, 63 - t]  # at: buffer is read
        cuda.syncthreads()
    y[t] = total


@kernel(block=64)
def rounds(x: f32_1d, y: f32_1d, n: i32, repaired: i32) -> None:
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for k in range(n):
        tile[t] = x[t] + float32(k)  # at: next round
        cuda.syncthreads()
        total += tile[63 - t]  # at: last round
        if repaired > 0:
            cuda.syncthreads()
    y[t] = total


@kernel(block=64)
def elements(y: f32_1d, h: i32_1d, at: i32, same: i32, counted: i32, broadcast: i32) -> None:
    """``at``: thread t has element t * at // 64; ``same``: from this thread on all write one value to one element."""
    shared = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    y[t * at // 64] = float32(t)  # at: element
    h[t // counted] += 1  # at: counted
    shared[t] = float32(0)  # at: cleared
    if t >= same:
        shared[63] = float32(1)  # at: same value
    cuda.syncthreads()
    if t == broadcast:
        shared[0] = float32(7)  # at: broadcast
    if t != 0:
        y[t * at // 64] += shared[0]  # at: received


@kernel(block=64)
def neighbours_in_memory(x: f32_1d, y: f32_1d, z: f32_1d, repaired: i32) -> None:
    t = cuda.threadIdx.x
    y[t] = x[t]  # at: memory is written
    if repaired > 0:
        cuda.syncthreads()
    z[t] = y[63 - t]  # at: memory is read


@kernel(block=64)
def counting(x: i32_1d, counts: i32_1d, first: i32, last: i32, plain: i32) -> None:
    bins = cuda.shared.array(4, int32)
    t = cuda.threadIdx.x
    if t < 4:
        bins[t] = 0  # at: bin is cleared
    if first > 0:
        cuda.syncthreads()
    if plain > 0:
        bins[x[t]] += 1  # at: plain count
    else:
        cuda.atomic.add(bins, x[t], 1)  # at: count
    if last > 0:
        cuda.syncthreads()
    if t < 4:
        counts[t] = bins[t]  # at: bin is read


@kernel(block=64)
def counting_in_memory(x: i32_1d, counts: i32_1d, seen: i32_1d, repaired: i32) -> None:
    t = cuda.threadIdx.x
    cuda.atomic.max(counts, 0, x[t])  # at: atomic in memory
    if repaired > 0:
        cuda.syncthreads()
    seen[t] = counts[0]  # at: plain in memory


@kernel(block=32)
def in_a_warp(x: f32_1d, y: f32_1d, repaired: i32) -> None:
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]  # at: before the shuffle
    other = cuda.shfl_xor_sync(FULL, x[t], 1)
    if repaired > 0:
        cuda.syncwarp()
    y[t] = tile[t ^ 1] + other  # at: behind the shuffle


@device_function
def put(values, i, v):
    values[i] = v  # at: put


@device_function
def element(values, i):
    return values[i]  # at: get


@device_function
def exchanged(tile, v, step):
    t = cuda.threadIdx.x
    put(tile, t, v)  # at: call of put
    cuda.syncthreads()
    return element(tile, (t + step) % 64)  # at: call of get


@kernel(block=64)
def through_functions(x: f32_1d, y: f32_1d, repaired: i32) -> None:
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    first = exchanged(tile, x[t], 1)  # at: first exchange
    if repaired > 0:
        cuda.syncthreads()
    second = exchanged(tile, first, 1)  # at: second exchange
    y[t] = second


@kernel(block=(8, 8))
def transposed(x: f32_2d, y: f32_2d, repaired: i32) -> None:
    tile = cuda.shared.array((8, 8), float32)
    column = cuda.threadIdx.x
    row = cuda.threadIdx.y
    tile[row, column] = x[row, column]  # at: row
    if repaired > 0:
        cuda.syncthreads()
    y[row, column] = tile[column, row]  # at: column


@kernel(block=64)
def stripes(y: f32_1d, z: f32_1d, stride: i32, read_at: i32) -> None:
    t = cuda.threadIdx.x
    first = cuda.blockIdx.x * stride
    y[first + t] = float32(t)  # at: stripe
    z[cuda.grid(1)] = y[first + t + read_at]  # at: of the next block


@kernel(block=64)
def many_readers(x: f32_1d, y: f32_1d, readers: i32, writer: i32) -> None:
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    cuda.syncthreads()
    value = float32(0)
    if t < readers:
        value = tile[63]  # at: one of many
    cuda.syncwarp()
    if t == writer:
        tile[63] = float32(1)  # at: writer
    y[t] = value


@kernel(block=64)
def promises(x: f32_1d, n: i32_1d, y: f32_1d, how: i32) -> None:
    """Barriers under what each thread loads for itself."""
    limits = cuda.shared.array(64, int32)
    weights = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    limits[t] = n[t]
    weights[t] = x[t]
    total = 0
    if how == 0:
        count = limits[t]  # uniform: promised # at: promised count
        for k in range(count):
            cuda.syncthreads()  # at: in a loop
            total += k
    elif how == 1:
        if limits[t] > 2:  # uniform: promised # at: branch
            cuda.syncthreads()  # at: under a branch
            total += 1
    elif how == 2:
        if limits[t] > 2:  # uniform: promised # at: other branch
            total += 2
        else:
            total += cuda.shfl_xor_sync(FULL, total, 1)  # at: under else
    elif how == 3:
        for _k in range(1, limits[t]):  # uniform: promised # at: range
            cuda.syncthreads()  # at: in a range
    elif how == 4:
        weight = weights[t]  # uniform: promised # at: weight
        while weight > float32(1):
            cuda.syncwarp()  # at: in a while
            weight = weight - float32(1)
    elif how == 5:
        unused = limits[t] + 1  # uniform: promised # at: no barrier
        total += unused
    y[t] = float32(total)


@kernel(block=64)
def early(n: i32_1d, y: f32_1d) -> None:
    t = cuda.threadIdx.x
    limit = n[t]
    if limit == 0:  # uniform: promised # at: early return
        return
    cuda.syncthreads()  # at: behind a return
    y[t] = float32(limit)


@device_function
def largest(tile, v):
    t = cuda.threadIdx.x
    tile[t] = v
    cuda.syncthreads()
    return max(tile[t], tile[t ^ 32])


@kernel(block=64)
def agreed(n: i32_1d, y: f32_1d) -> None:
    tile = cuda.shared.array(64, int32)
    most = largest(tile, n[cuda.threadIdx.x])  # uniform: promised # at: result of a function
    while most > 0:
        cuda.syncthreads()  # at: while of a result
        most = most // 2
    y[cuda.threadIdx.x] = float32(most)


@kernel(block=64)
def in_each_block(x: f32_1d, y: f32_1d, repaired: i32) -> None:
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    if t % 2 == 0:
        tile[t] = x[i]  # at: even
    else:
        tile[t] = -x[i]  # at: odd
    if repaired > 0:
        cuda.syncthreads()
    y[i] = tile[63 - t] + tile[t ^ 2]  # at: even and odd
