"""Kernels of ``--check-numerics``: which numbers in memory are not finite, and which of them a launch made.

They see memory as two-byte words, of which an element has ``words`` and its highest one has the exponent. A thread
looks at 32 elements, so that their marks are one word and nobody shares it.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
from numba import cuda

from instrumentation.kernel import kernel
from instrumentation.kernel.types import i64, i64_1d, u16_1d, u32_1d

#: threads of a block, and elements of a thread
BLOCK, MARKS = 256, 32
#: words of a state: elements that the launch which runs made; the first of them, and the first NaN; the number of the
#: first launch that made any, and how many; launches that made some behind it, and how many; for each array that the
#: first one reads, how many it held and the first one. "First" is argument << ELEMENT_BITS | element
CURRENT, FIRST, FIRST_NAN, SEALED, MADE, LATER_LAUNCHES, LATER, OPERANDS = range(8)
ELEMENT_BITS = 40
NOWHERE = (1 << 62) - 1
MAX_OPERANDS = 24
STATE_WORDS = OPERANDS + 2 * MAX_OPERANDS


@kernel(block=BLOCK)
def mark(
    memory: u16_1d, words: i64, exponent: i64, fraction: i64, least: i64, marks: u32_1d, first_mark: i64
) -> None:
    """Mark the elements that are not finite; ``least`` 1: those that are NaN."""
    word = cuda.blockIdx.x * 256 + cuda.threadIdx.x
    count = memory.shape[0] // words
    bits = 0
    for i in range(32):
        element = word * 32 + i
        if element < count:
            high = memory[element * words + words - 1]
            if (high & exponent) == exponent and (high & fraction) >= least:
                bits = bits | (1 << i)
    if word * 32 < count:
        marks[first_mark + word] = bits


@kernel(block=BLOCK)
def count_made(
    memory: u16_1d,
    words: i64,
    exponent: i64,
    fraction: i64,
    least: i64,
    marks: u32_1d,
    first_mark: i64,
    argument: i64,
    state: i64_1d,
) -> None:
    """Count the elements that ``mark`` would mark now and did not; keep the first of the first launch."""
    word = cuda.blockIdx.x * 256 + cuda.threadIdx.x
    count = memory.shape[0] // words
    if word * 32 < count:
        before = marks[first_mark + word]
        made = 0
        first = NOWHERE
        first_nan = NOWHERE
        for i in range(32):
            element = word * 32 + i
            if element < count and ((before >> i) & 1) == 0:
                high = memory[element * words + words - 1]
                if (high & exponent) == exponent and (high & fraction) >= least:
                    made += 1
                    first = min(first, element)
                    if (high & fraction) != 0:
                        first_nan = min(first_nan, element)
        if made > 0:
            cuda.atomic.add(state, CURRENT, made)
            if state[SEALED] == 0:
                cuda.atomic.min(state, FIRST, (argument << ELEMENT_BITS) | first)
                if first_nan < NOWHERE:
                    cuda.atomic.min(state, FIRST_NAN, (argument << ELEMENT_BITS) | first_nan)


@kernel(block=BLOCK)
def count_operand(memory: u16_1d, words: i64, exponent: i64, slot: i64, state: i64_1d) -> None:
    """Behind the first launch that made any: how many elements that it may have read are not finite."""
    if state[SEALED] == 0 and state[CURRENT] > 0:
        word = cuda.blockIdx.x * 256 + cuda.threadIdx.x
        count = memory.shape[0] // words
        held = 0
        first = NOWHERE
        for i in range(32):
            element = word * 32 + i
            if element < count:
                high = memory[element * words + words - 1]
                if (high & exponent) == exponent:
                    held += 1
                    first = min(first, element)
        if held > 0:
            cuda.atomic.add(state, slot, held)
            cuda.atomic.min(state, slot + 1, first)


@kernel(block=BLOCK)
def count_marked(marks: u32_1d, first_mark: i64, n_marks: i64, slot: i64, state: i64_1d) -> None:
    """As ``count_operand`` of an array that the launch wrote as well: what was marked before it ran."""
    if state[SEALED] == 0 and state[CURRENT] > 0:
        word = cuda.blockIdx.x * 256 + cuda.threadIdx.x
        if word < n_marks:
            held = 0
            first = NOWHERE
            for i in range(32):
                if ((marks[first_mark + word] >> i) & 1) == 1:
                    held += 1
                    first = min(first, word * 32 + i)
            if held > 0:
                cuda.atomic.add(state, slot, held)
                cuda.atomic.min(state, slot + 1, first)


@kernel(block=1)
def seal(state: i64_1d, launch: i64) -> None:
    """Behind a launch: if it is the first that made any it stays known as that, else it is counted."""
    made = state[CURRENT]
    if made > 0:
        if state[SEALED] == 0:
            state[SEALED] = launch
            state[MADE] = made
        else:
            state[LATER_LAUNCHES] = state[LATER_LAUNCHES] + 1
            state[LATER] = state[LATER] + made
        state[CURRENT] = 0
