"""Random kernels inside the dialect, each as kernel source and as a Python generator that yields at collectives.

One text serves both: a collective is written as a token, which becomes a ``numba.cuda`` call in the kernel and a
``yield`` in the interpreter. Values are non-negative integers that stay small, so nothing overflows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

BLOCK, LENGTH, PRIME = 64, 97, 1009
HELPERS = """
{device}
def mixed(p, q):
    if p < q:
        return (p * 3 + q) % 1009
    for k in range(p % 3):
        q = (q + p + k) % 1009
    return q

{device}
def look_up(x, p):
    total = 0
    for k in range(p % 4):
        total += x[(p + k) % x.shape[0]]
        if total > 900:
            break
    return total % 1009

{device}
def together(p):
    total = p
    for o in (16, 3):
        total = (total + «xor¦total¦o») % 1009
    return total
"""
KERNEL_HEADER = """
from numba import cuda, int64
from instrumentation.kernel import device_function, kernel
from instrumentation.kernel.types import i32, i64_1d

{helpers}

@kernel(block=64)
def fuzzed(x: i64_1d, y: i64_1d, n: i32) -> None:
    s = cuda.shared.array(64, int64)
    own = cuda.shared.array(64, int64)
    row = cuda.local.array(4, int64)
    t = cuda.threadIdx.x
    b = cuda.blockIdx.x
    i = cuda.grid(1)
"""
THREAD_HEADER = """
{helpers}

def fuzzed(x, y, n, s, own, t, b):
    row = [0] * 4
    i = b * 64 + t
"""


@dataclass(frozen=True)
class Context:
    """Where a statement stands."""

    #: every thread of the block comes here: collectives may stand, uniform names may be assigned
    uniform: bool
    depth: int
    #: loop variables that may be read: (name, uniform)
    loops: tuple[tuple[str, bool], ...] = ()
    #: None outside loops, else whether the innermost loop runs the same for all threads
    loop: bool | None = None


class Program:
    """One random kernel. ``kernel_source`` and ``thread_source`` are the two forms of its text."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.varying = ["v0", "v1", "v2", "w0", "w1"]
        self.uniform = ["u0", "u1"]
        self.statements = 0
        start = Context(uniform=True, depth=1)
        for k, name in enumerate(self.uniform):
            self._line(1, f"{name} = x[b + {k}]")
        for name in self.varying:
            # A w is uniform here and assigned later where threads differ: the analysis must notice.
            self._line(
                1, f"{name} = {'t * 7 % 13' if name[0] == 'v' else self._leaf(uniform=True, context=start)}"
            )
        self._line(1, "s[t] = t")
        self._line(1, "own[t] = t + 1")
        for k in range(4):
            self._line(1, f"row[{k}] = t + {k}")
        self._block(start, 7)
        if self.random.random() < 0.5:
            self._line(1, f"if {self._condition(uniform=False, context=start)}:")
            if self.random.random() < 0.5:
                self._line(2, "y[i] = v0 + 1")
            self._line(2, "return")
            self._block(Context(uniform=False, depth=1), 2)
        total = " + ".join(
            f"{name} * {k + 3}"
            for k, name in enumerate([*self.varying, *self.uniform, "own[t]", "row[1]", "row[2]"])
        )
        self._line(1, f"y[i] += {total}")
        body = "\n".join(self.lines) + "\n"
        self.kernel_source = _as_kernel(
            KERNEL_HEADER.format(helpers=HELPERS.format(device="@device_function")) + body
        )
        self.thread_source = _as_thread(THREAD_HEADER.format(helpers=HELPERS.format(device="")) + body)

    def with_misplaced_collective(self) -> str:
        """Kernel source with a collective that some threads miss, at the end of the kernel."""
        kind = self.random.choice(["if v0 % 3 == t % 2:", "for k9 in range(t % 3):", "while v0 < t:"])
        what = self.random.choice(["«barrier»", "v1 = «up¦v0¦1»", "w0 = «together¦v0¦»"])
        more = f"    {kind}\n        v0 += 1\n        {what}\n    y[i] = v1 + w0\n"
        lines = [line.replace("return", "pass") for line in self.lines]
        return _as_kernel(
            KERNEL_HEADER.format(helpers=HELPERS.format(device="@device_function"))
            + "\n".join(lines)
            + "\n"
            + more
        )

    # --- text

    def _line(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def _leaf(self, *, uniform: bool, context: Context) -> str:
        names = ["n", "b", str(self.random.randrange(20)), "x[b]", "x.shape[0]", *self.uniform]
        names += [name for name, same in context.loops if same or not uniform]
        if not uniform:
            names += [
                *self.varying,
                *self.varying,
                "t",
                "i",
                "x[i]",
                "own[t]",
                f"row[{self.random.randrange(4)}]",
            ]
            names += [f"x[({self.random.choice(self.varying)} + t) % {LENGTH}]"]
        return self.random.choice(names)

    def _expression(self, *, uniform: bool, context: Context, depth: int = 2) -> str:
        if depth == 0 or self.random.random() < 0.25:
            return self._leaf(uniform=uniform, context=context)
        left = self._expression(uniform=uniform, context=context, depth=depth - 1)
        right = self._expression(uniform=uniform, context=context, depth=depth - 1)
        form = self.random.choice([
            "({l} + {r})", "({l} * {r})", "max({l}, {r})", "min({l}, {r})", "(({l} * 5) ^ {r})", "(({l}) >> 1)",
            "({l} if {c} else {r})", "mixed(({l}) % 50, ({r}) % 50)", "look_up(x, ({l}) % 90)",
        ])  # fmt: skip
        condition = f"{left} < {self._leaf(uniform=uniform, context=context)}"
        return form.format(l=left, r=right, c=condition)

    def _condition(self, *, uniform: bool, context: Context) -> str:
        left = self._expression(uniform=uniform, context=context, depth=1)
        if not uniform:
            left = f"({left} + {self.random.choice(['t', 'v0', 'w0', 'w1'])})"
        right = self._leaf(uniform=uniform, context=context)
        return self.random.choice([
            f"({left}) % 3 == {self.random.randrange(3)}", f"{left} < {right}", f"not ({left} > {right})",
            f"{left} % 2 == 0 or {right} % 5 > 1", f"{left} % 4 != 1 and {right} % 3 != 0",
        ])  # fmt: skip

    def _collective(self, context: Context) -> str:
        value = self._expression(uniform=False, context=context, depth=1)
        kind = self.random.choice(["xor", "up", "down", "index"])
        offset = self.random.choice([
            str(self.random.randrange(32)), self._leaf(uniform=True, context=context),
            *(["(t * 5) % 32"] if kind == "index" else []),
        ])  # fmt: skip
        return self.random.choice([f"«{kind}¦{value}¦{offset}»"] * 3 + [f"«together¦({value}) % {PRIME}¦»"])

    # --- statements

    def _block(self, context: Context, count: int) -> None:
        for _ in range(self.random.randint(1, count)):
            self._statement(context)

    def _statement(self, context: Context) -> None:
        self.statements += 1
        choices: list[Callable[[Context], None]] = [self._assign] * 5 + [self._memory] * 2
        if context.depth < 4 and self.statements < 45:
            choices += [self._if] * 3 + [self._for] * 3 + [self._while]
        if context.uniform:
            choices += (
                [self._shuffle] * 3 + [self._exchange] * 2 + [self._assign_uniform] * 3 + [self._unrolled]
            )
        if context.loop is not None:
            choices += [self._leave] * 2
        self.random.choice(choices)(context)

    def _assign(self, context: Context) -> None:
        name = self.random.choice(self.varying)
        source = self._expression(uniform=self.random.random() < 0.3, context=context)
        if self.random.random() < 0.25:
            self._line(context.depth, f"{name} += ({source}) % {PRIME}")
            self._line(context.depth, f"{name} %= {PRIME}")
        else:
            self._line(context.depth, f"{name} = ({source}) % {PRIME}")

    def _assign_uniform(self, context: Context) -> None:
        name = self.random.choice(self.uniform)
        self._line(context.depth, f"{name} = ({self._expression(uniform=True, context=context)}) % {PRIME}")

    def _memory(self, context: Context) -> None:
        value = f"({self._expression(uniform=False, context=context)}) % {PRIME}"
        place = self.random.choice(["y[i]", "own[t]", f"row[{self.random.choice(['t', 'v1', 'n'])} % 4]"])
        self._line(context.depth, f"{place} = {value}")

    def _if(self, context: Context) -> None:
        same = self.random.random() < 0.5
        inner = Context(context.uniform and same, context.depth + 1, context.loops, context.loop)
        self._line(context.depth, f"if {self._condition(uniform=same, context=context)}:")
        self._block(inner, 3)
        if self.random.random() < 0.5:
            self._line(context.depth, "else:")
            self._block(inner, 3)

    def _for(self, context: Context) -> None:
        same = context.uniform and self.random.random() < 0.6
        name = self.random.choice([k for k in ("k0", "k1", "k2", "k3", "k4") if k not in dict(context.loops)])
        bound = f"({self._expression(uniform=same, context=context, depth=1)}) % 4"
        arguments = self.random.choice([bound, f"1, {bound}", f"{bound}, 0, -1", f"0, 2 * ({bound}), 2"])
        alone = same and self.random.random() < 0.2
        # A per-thread variable of a loop that all threads run alike is still the same for all.
        hint = "  # lanes: outside" if alone else ""
        inner = Context(
            same and not alone,
            context.depth + 1,
            (*context.loops, (name, same and not alone)),
            same and not alone,
        )
        self._line(context.depth, f"for {name} in range({arguments}):{hint}")
        self._block(inner, 3)

    def _while(self, context: Context) -> None:
        same = context.uniform and self.random.random() < 0.6
        name = self.random.choice(self.uniform if same else self.varying)
        self._line(context.depth, f"{name} = ({self._leaf(uniform=same, context=context)}) % 4")
        # The test changes before anything can leave or continue; 50 rounds at most, since the body may assign it.
        counter = f"c{self.statements}"
        self._line(context.depth, f"{counter} = 0")
        self._line(context.depth, f"while {name} < 5 and {counter} < 6:")
        self._line(context.depth + 1, f"{name} += 1")
        self._line(context.depth + 1, f"{counter} += 1")
        self._block(Context(same, context.depth + 1, context.loops, same), 3)

    def _leave(self, context: Context) -> None:
        same = bool(context.loop)
        if same and not context.uniform:
            self._line(context.depth, "pass")  # leaving would make a loop with collectives a per-thread loop
            return
        self._line(context.depth, f"if {self._condition(uniform=same, context=context)}:")
        self._line(context.depth + 1, self.random.choice(["break", "continue"]))

    def _shuffle(self, context: Context) -> None:
        name = self.random.choice(self.varying)
        value = self._collective(context)
        more = self.random.choice(["", f" + {self._leaf(uniform=False, context=context)}"])
        if "together" in value and "[" in more:
            more = ""  # a load beside an inlined call is refused
        self._line(context.depth, f"{name} = ({value}{more}) % {PRIME}")

    def _exchange(self, context: Context) -> None:
        self._line(context.depth, "«barrier»")
        self._line(context.depth, f"s[t] = ({self._expression(uniform=False, context=context)}) % {PRIME}")
        self._line(context.depth, "«barrier»")
        name = self.random.choice(self.varying)
        self._line(
            context.depth, f"{name} = s[({self._expression(uniform=False, context=context)}) % {BLOCK}]"
        )
        self._line(context.depth, "«barrier»")

    def _unrolled(self, context: Context) -> None:
        name = self.random.choice(self.varying)
        self._line(context.depth, "for o in (1, 8, 31):")
        self._line(
            context.depth + 1,
            f"{name} = ({name} + «{self.random.choice(['xor', 'up', 'down'])}¦{name}¦o») % {PRIME}",
        )


_NAMES = {"xor": "shfl_xor_sync", "up": "shfl_up_sync", "down": "shfl_down_sync", "index": "shfl_sync"}
_TOKEN = re.compile("«([a-z]+)¦([^¦»]*)¦([^¦»]*)»")


def _as_kernel(text: str) -> str:
    def call(match: re.Match[str]) -> str:
        if match[1] == "together":
            return f"together({match[2]})"
        return f"cuda.{_NAMES[match[1]]}(0xFFFFFFFF, int64({match[2]}), {match[3]})"

    return _TOKEN.sub(call, text).replace("«barrier»", "cuda.syncthreads()")


def _as_thread(text: str) -> str:
    def event(match: re.Match[str]) -> str:
        if match[1] == "together":
            return f"(yield from together({match[2]}))"
        return f'(yield ("{match[1]}", {match[2]}, {match[3]}))'

    return _TOKEN.sub(event, text).replace("«barrier»", "yield None")


def interpret(source: str, blocks: int, x: np.ndarray, y: np.ndarray, n: int) -> np.ndarray:
    """Run the thread form over a grid: threads go from one collective to the next, all to the same one."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # noqa: S102
    values, out = _Array(x.tolist()), y.tolist()
    for b in range(blocks):
        s, own = [0] * BLOCK, [0] * BLOCK
        threads = [namespace["fuzzed"](values, out, n, s, own, t, b) for t in range(BLOCK)]
        if isinstance(threads[0], Generator):
            _run_block(threads)
    return np.array(out, np.int64)


class _Array(list):  # type: ignore[type-arg]
    @property
    def shape(self) -> tuple[int]:
        return (len(self),)


def _run_block(threads: list[Generator[Any, Any, None]]) -> None:
    answers: list[Any] = [None] * len(threads)
    while True:
        events: list[Any] = []
        for thread, answer in zip(threads, answers, strict=True):
            try:
                events.append(thread.send(answer))
            except StopIteration:
                events.append("done")
        kinds = {e[0] if isinstance(e, tuple) else e for e in events}
        assert len(kinds) == 1, f"the generated program is wrong: threads meet at {kinds}"
        kind = kinds.pop()
        if kind == "done":
            return
        answers = [None] * len(threads)
        if kind is not None:
            for t, (_, _, given) in enumerate(events):
                lane, offset = t % 32, int(given) & 31
                source = {"xor": lane ^ offset, "up": lane - offset, "down": lane + offset, "index": offset}[
                    kind
                ]
                answers[t] = events[t - lane + (source if 0 <= source < 32 else lane)][1]
