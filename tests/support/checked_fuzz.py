"""Random kernels for checked lowerings: indices of loops that are inside or not, elements that nothing wrote.

What a statement loads goes into a total that differs between threads, so both devices make each access once a thread.
Nothing that is loaded decides what is done next: an element that nothing wrote may hold anything.
"""

from __future__ import annotations

import random

BLOCK, LENGTH = 4, 29

HEAD = """
@device_function
def chosen(x, i, j, c):
    if c > 2:
        return x[i] - 1
    if c == 1:
        return 7
    return x[i] + x[j]


@device_function
def gathered(x, z, row, i, n):
    total = 0
    for k in range(n):
        if k < 3:
            total = total + x[i + k] * 2
        else:
            total = total - z[row, k]
    at = min(i, 5)
    return total + z[row, at]


@kernel(block=4)
def made(
    x: i64_1d, z: i64_2d, u: u8_1d, v: u16_1d, w: i32_1d, y: i64_1d, first: i32, end: i32, at: i32, row: i32, cap: i32,
    mask: i32, hole: i32, h: u32, g: u32,
) -> None:
    t = cuda.threadIdx.x
    tile = cuda.shared.array(13, int64)
    grid = cuda.shared.array((3, 5), int64)
    own = cuda.local.array(5, int64)
    pair = cuda.local.array((2, 3), int64)
    total = t + 1
    p = at + t
    q = row - t
    for k in range(4):
        if k * 4 + t != hole and k * 4 + t < 13:
            tile[k * 4 + t] = total + k
        if k < 3 and t != hole:
            grid[k, t] = total * k
    if t == 1 and mask & 8:
        for k in range(3):
            grid[k, 4] = k
    cuda.syncthreads()
"""


class Program:
    """One kernel: ``source`` is its text under the header of ``kernel_source``."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.statements = 0
        self.loops = 0
        for _ in range(self.random.randint(2, 5)):
            self._statement(1, (), in_loop=False)
        self.lines.append("    y[t] = total")
        self.source = HEAD + "\n".join(self.lines) + "\n"

    def _line(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    # --- expressions

    def _leaf(self, loops: tuple[str, ...]) -> str:
        names = [
            "t",
            "at",
            "row",
            "cap",
            "p",
            "q",
            "first",
            "x.shape[0]",
            str(self.random.randrange(9)),
            *loops * 3,
        ]
        return self.random.choice(names)

    def _number(self, loops: tuple[str, ...], depth: int = 2) -> str:
        if depth == 0 or self.random.random() < 0.2:
            return self._leaf(loops)
        left, right = (self._number(loops, depth - 1) for _ in range(2))
        c = self.random.choice([1, 2, 3, 4, 5, 7, 8])
        form = self.random.choice([
            "({l} + {r})", "({l} + {r})", "({l} - {r})", "({l} + {c})", "({c} * {l})", "({l} << 1)", "({l} >> 1)",
            "({l} & 7)", "(3 & {l})", "({l} % {c})", "({l} // {c})", "min({l}, {r})", "max({l}, {r})", "(-{l})",
            "({l} | 1)", "({l} ^ {r})", "(((h - g) >> 60) + {l})", "((h >> 1) + {l})", "min({l}, {c})",
            "({l} if {r} > 2 else {c})", "(((h << 3) >> 2) - {l})",
        ])  # fmt: skip
        return form.format(l=left, r=right, c=c)

    def _inside(self, loops: tuple[str, ...], extent: int) -> str:
        """An index that is often inside."""
        base = self.random.choice([*loops, *loops, "t", "at"])
        c = self.random.randrange(max(1, extent - 3))
        form = self.random.choice([
            "{b}", "{b} + {c}", "2 * {b} + 1", "{c} - {b}", "({b} + {c}) >> 1", "({b} + {c}) % {e}", "{b} & 3",
            "min({b}, {l})", "({b} + t) // 2", "min({b} + t, {l})", "{c}", "3 * {b} - t", "{b} + t",
        ])  # fmt: skip
        return form.format(b=base, c=c, e=extent, l=extent - 1)

    def _index(self, loops: tuple[str, ...], extent: int) -> str:
        if self.random.random() < 0.75:
            return self._inside(loops, extent)
        return self._number(loops)

    def _load(self, loops: tuple[str, ...]) -> str:
        def index(extent: int) -> str:
            return self._index(loops, extent)

        place = str(self.random.randrange(5))
        return self.random.choice([
            lambda: f"x[{index(LENGTH)}]", lambda: f"x[{index(LENGTH)}]", lambda: f"z[{index(3)}, {index(9)}]",
            lambda: f"z[row, {index(9)}]", lambda: f"u[{index(LENGTH)}]", lambda: f"v[{index(LENGTH)}]",
            lambda: f"w[{index(LENGTH)}]", lambda: f"tile[{index(13)}]", lambda: f"tile[{index(13)}]",
            lambda: f"grid[{index(3)}, {index(5)}]", lambda: f"own[{place}]", lambda: f"own[{index(5)}]",
            lambda: f"pair[{int(place) & 1}, {int(place) >> 1}]",
            lambda: f"chosen({self.random.choice(['x', 'tile'])}, {index(13)}, {index(13)}, {self._number(loops, 1)})",
            lambda: f"gathered({self.random.choice(['x', 'tile'])}, z, row, {index(13)}, {index(5)} & 7)",
            lambda: f"(x[{index(LENGTH)}] if {self._condition(loops)} else w[{index(LENGTH)}])",
        ])()  # fmt: skip

    def _condition(self, loops: tuple[str, ...]) -> str:
        return (
            f"{self._number(loops, 1)} {self.random.choice(['<', '>', '==', '!='])} {self._number(loops, 1)}"
        )

    # --- statements

    def _block(self, depth: int, loops: tuple[str, ...], *, in_loop: bool) -> None:
        for _ in range(self.random.randint(1, 3)):
            self._statement(depth, loops, in_loop=in_loop)

    def _statement(self, depth: int, loops: tuple[str, ...], *, in_loop: bool) -> None:
        self.statements += 1
        kind = self.random.random()
        if kind < 0.35 and depth < 4 and self.statements < 14:
            self._loop(depth, loops)
        elif kind < 0.5 and depth < 5 and self.statements < 20:
            self._line(depth, f"if {self._condition(loops)}:")
            self._block(depth + 1, loops, in_loop=in_loop)
            if self.random.random() < 0.5:
                self._line(depth, "else:")
                self._block(depth + 1, loops, in_loop=in_loop)
        elif kind < 0.6:
            self._line(depth, f"{self.random.choice('pq')} = ({self._number(loops, 1)}) % 64 - 8")
        elif kind < 0.68:
            self._line(depth, f"{self.random.choice('pq')} = {self._inside(loops, 9)}")
        elif kind < 0.78:
            place = self.random.choice([
                str(self.random.randrange(5)), str(self.random.randrange(5)), self._index(loops, 5),
            ])  # fmt: skip
            self._line(depth, f"own[{place}] = total + {self._leaf(loops)}")
        elif kind < 0.82:
            self._line(depth, f"pair[{self.random.randrange(2)}, {self.random.randrange(3)}] = total")
        elif kind < 0.85 and in_loop:
            self._line(depth, f"if {self._condition(loops)}:")
            self._line(depth + 1, self.random.choice(["break", "continue"]))
        elif kind < 0.88 and depth == 1:
            self._line(depth, "cuda.syncthreads()")
            self._line(depth, "tile[t] = total")
            self._line(depth, "cuda.syncthreads()")
        else:
            loads = (self._load(loops) for _ in range(self.random.choice([1, 1, 2, 2, 3, 9])))
            # Each on a line of its own: that is what a finding tells.
            self._line(depth, "total = (")
            self._line(depth + 1, "total * 3")
            for load in loads:
                self._line(depth + 1, f"+ {load}")
            self._line(depth, ")")

    def _loop(self, depth: int, loops: tuple[str, ...]) -> None:
        self.loops += 1
        name = f"k{self.loops}"
        if self.random.random() < 0.35:
            array = self.random.choice(["own[{k}]", "own[4 - {k}]", "pair[{k} & 1, {k} >> 1]"]).format(k=name)
            size = self.random.choice(["5", "4", "5", "1, 5", "0", "4, -1, -1"])
            self._line(depth, f"for {name} in range({size}):")
            if self.random.random() < 0.4:
                self._line(depth + 1, f"if (mask >> {name}) & 1:")
                self._line(depth + 2, f"{array} = {self._load((*loops, name))}")
            else:
                load = self._load((*loops, name))
                self._line(
                    depth + 1, self.random.choice([f"{array} = total + {load}", f"total = total + {array}"])
                )
        else:
            ends = self.random.choice([
                "first, end", "first, end", "end", "cap & 7", "first, end, 2", "end, first, -1", "min(end, cap)",
                "p & 7", "first, first + 4", "3", "row, row + 3", "max(first, 0), end", "(end + 3) // 2", "h & 7",
            ])  # fmt: skip
            self._line(depth, f"for {name} in range({ends}):")
        self._block(depth + 1, (*loops, name), in_loop=True)
