"""What the lint reports: each snippet marks the lines of its reports with ``# BAD``."""

from __future__ import annotations

from textwrap import dedent

import pytest

from instrumentation.lint import lint_source

SNIPPETS = {
    "discarded statement": """
        def f(arena):
            arena.reserve(1, owner=o, name="x")  # BAD
        """,
    "discarded at module level": """
        allocator.reserve_arena(4096, owner=o, name="x")  # BAD
        """,
    "discarded reserve_all": """
        def f(arena):
            arena.reserve_all(requests)  # BAD
        """,
    "discarded reserve_overlay": """
        def f(arena):
            arena.reserve_overlay(requests, owner=o, name="x")  # BAD
        """,
    "bound to underscore": """
        def f(arena):
            _ = arena.reserve(1)  # BAD
        """,
    "value at once": """
        def f(arena):
            return arena.reserve(1).value  # BAD
        """,
    "value of a name": """
        def f(arena):
            r = arena.reserve(1)
            return r.value  # BAD
        """,
    "never used": """
        def f(arena):
            r = arena.reserve(1)  # BAD
        """,
    "checked on one path only": """
        def f(arena, careful):
            r = arena.reserve(1)
            if careful:
                if not r.ok:
                    return None
            return r.value  # BAD
        """,
    "one path to the end is unchecked": """
        def f(arena, careful):
            r = arena.reserve(1)  # BAD
            if careful and not r.ok:
                raise MemoryError
        """,
    "early return before the check": """
        def f(arena, empty):
            r = arena.reserve(1)  # BAD
            if empty:
                return None
            return r.unwrap()
        """,
    "early raise before the check": """
        def f(arena, n):
            r = arena.reserve(n)  # BAD
            if n > 5:
                raise ValueError(n)
            return r.unwrap()
        """,
    "checked but used in the failed branch": """
        def f(arena):
            r = arena.reserve(1)
            if not r.ok:
                return r.value  # BAD
            return None
        """,
    "check that goes on": """
        def f(arena):
            r = arena.reserve(1)
            if not r.ok:
                log.warning("no memory")
            return r.value  # BAD
        """,
    "inverted check": """
        def f(arena):
            r = arena.reserve(1)
            if r.ok:
                return None
            return r.value  # BAD
        """,
    "or instead of and": """
        def f(arena, force):
            r = arena.reserve(1)
            if r.ok or force:
                return r.value  # BAD
            return None
        """,
    "second not looked at when the first failed": """
        def f(arena):
            a = arena.reserve(1)
            b = arena.reserve(2)  # BAD
            if not (a.ok and b.ok):
                return None
            return a.value, b.value
        """,
    "second not looked at, in a name": """
        def f(arena):
            a, b = arena.reserve(1), arena.reserve(2)  # BAD
            both = a.ok and b.ok
            if both:
                return a.value, b.value
            return None
        """,
    "swapped before the check": """
        def f(arena):
            a, b = arena.reserve(1), arena.reserve(2)
            if not a.ok:
                return b.unwrap()
            a, b = b, a
            return a.value  # BAD
        """,
    "condition of another reservation": """
        def f(arena):
            a = arena.reserve(1)
            b = arena.reserve(2)
            if not a.ok:
                return b.unwrap()
            return b.value  # BAD
        """,
    "assert is no check": """
        def f(arena):
            r = arena.reserve(1)
            assert r.ok
            return r.value  # BAD
        """,
    "assert alone": """
        def f(arena):
            r = arena.reserve(1)  # BAD
            assert r.ok
        """,
    "truth thrown away": """
        def f(arena):
            r = arena.reserve(1)
            r.ok  # BAD
            r.unwrap().free()
        """,
    "not r thrown away": """
        def f(arena):
            r = arena.reserve(1)
            not r  # BAD
        """,
    "outcome stored and never tested": """
        def f(arena):
            r = arena.reserve(1)  # BAD
            ok = r.ok
        """,
    "outcome only printed": """
        def f(arena):
            r = arena.reserve(1)
            print(r.ok)
            return r.value  # BAD
        """,
    "is None says nothing": """
        def f(arena):
            r = arena.reserve(1)
            if r is None:
                return None
            return r.value  # BAD
        """,
    "tuple unpacking": """
        def f(arena):
            k, v = arena.reserve_all(requests)  # BAD
            return k, v
        """,
    "iterated": """
        def f(arena):
            for buffer in arena.reserve_all(requests):  # BAD
                buffer.free()
        """,
    "subscripted": """
        def f(arena):
            r = arena.reserve_all(requests)
            return r[0]  # BAD
        """,
    "used as the memory": """
        def f(arena):
            buffer = arena.reserve(1)
            return buffer.view("float32", (1,))  # BAD
        """,
    "entered by with": """
        def f(arena):
            with arena.reserve(1) as buffer:  # BAD
                use(buffer)
        """,
    "overwritten": """
        def f(arena):
            r = arena.reserve(1)  # BAD
            r = arena.reserve(2)
            return r.unwrap()
        """,
    "overwritten by None": """
        def f(arena):
            r = arena.reserve(1)  # BAD
            r = None
            return r
        """,
    "overwritten in the next turn": """
        def f(arena, sizes):
            r = None
            for n in sizes:
                r = arena.reserve(n)  # BAD
            return r.unwrap()
        """,
    "deleted": """
        def f(arena):
            r = arena.reserve(1)  # BAD
            del r
        """,
    "loop leaves before the check": """
        def f(arena):
            while True:
                r = arena.reserve(1)
                if enough():
                    break
                if not r.ok:
                    return None
            return r.value  # BAD
        """,
    "continue before the check": """
        def f(arena, sizes):
            for n in sizes:
                r = arena.reserve(n)  # BAD
                if n < 5:
                    continue
                r.unwrap().free()
        """,
    "unwrap swallowed": """
        def f(arena):
            try:
                buffer = arena.reserve(1).unwrap()  # BAD
            except Exception:
                pass
        """,
    "unwrap swallowed by a bare except": """
        def f(arena):
            r = arena.reserve(1)
            try:
                use(r.unwrap())  # BAD
            except:
                ...
        """,
    "unwrap swallowed by its own error": """
        def f(arena):
            try:
                use(arena.reserve(1).unwrap())  # BAD
            except (ValueError, OutOfMemoryError):
                pass
        """,
    "unwrap suppressed": """
        def f(arena):
            with contextlib.suppress(OutOfMemoryError):
                use(arena.reserve(1).unwrap())  # BAD
        """,
    "unwrap swallowed by return in finally": """
        def f(arena):
            try:
                use(arena.reserve(1).unwrap())  # BAD
            finally:
                return None
        """,
    "unwrap discarded": """
        def f(arena):
            arena.reserve(1).unwrap()  # BAD
        """,
    "unwrap of a name discarded": """
        def f(arena):
            r = arena.reserve(1)
            r.unwrap()  # BAD
        """,
    "handler goes on unchecked": """
        def f(arena):
            r = arena.reserve(1)  # BAD
            try:
                prepare()
                if not r.ok:
                    return None
            except OSError:
                return False
            return r.value
        """,
    "finally uses the value": """
        def f(arena):
            r = arena.reserve(1)
            try:
                if r.ok:
                    use(r.value)
            finally:
                r.value.free()  # BAD
        """,
    "with body leaves it": """
        def f(arena, lock):
            with lock:
                r = arena.reserve(1)  # BAD
        """,
    "comprehension": """
        def f(arena, sizes):
            return [arena.reserve(n).value for n in sizes]  # BAD
        """,
    "comprehension discarded": """
        def f(arena, sizes):
            [arena.reserve(n) for n in sizes]  # BAD
        """,
    "elements of a list": """
        def f(arena, sizes):
            rs = [arena.reserve(n) for n in sizes]
            return [r.value for r in rs]  # BAD
        """,
    "element by index": """
        def f(arena):
            rs = [arena.reserve(1), arena.reserve(2)]
            if not rs[0].ok:
                return None
            return rs[0].value, rs[1].value  # BAD
        """,
    "appended": """
        def f(arena, sizes):
            rs = []
            for n in sizes:
                rs.append(arena.reserve(n))
            for r in rs:
                r.value.free()  # BAD
        """,
    "dict of reservations": """
        def f(arena, sizes):
            rs = {n: arena.reserve(n) for n in sizes}
            for r in rs.values():
                r.value.free()  # BAD
        """,
    "any is not all": """
        def f(arena, sizes):
            rs = [arena.reserve(n) for n in sizes]
            if any(r.ok for r in rs):
                return [r.value for r in rs]  # BAD
            return []
        """,
    "walrus": """
        def f(arena):
            if (r := arena.reserve(1)) is not None:
                return r.value  # BAD
            return None
        """,
    "conditional expression": """
        def f(arena, big):
            r = arena.reserve(2) if big else arena.reserve(1)
            return r.value  # BAD
        """,
    "conditional expression the wrong way round": """
        def f(arena):
            r = arena.reserve(1)
            return None if r.ok else r.value  # BAD
        """,
    "match on something else": """
        def f(arena, mode):
            r = arena.reserve(1)  # BAD
            match mode:
                case "a":
                    return r.unwrap()
                case _:
                    return None
        """,
    "match takes the value": """
        def f(arena):
            match arena.reserve(1):
                case Reservation(value=buffer):  # BAD
                    return buffer
        """,
    "match the failed case": """
        def f(arena):
            r = arena.reserve(1)
            match r.ok:
                case False:
                    return r.value  # BAD
                case True:
                    return r.value
        """,
    "lambda": """
        def f(arena):
            return lambda: arena.reserve(1).value  # BAD
        """,
    "nested function reads it": """
        def f(arena):
            r = arena.reserve(1)
            def later():
                return r.value  # BAD
            return later
        """,
    "bound method": """
        def f(arena):
            reserve = arena.reserve
            reserve(1)  # BAD
        """,
    "partial": """
        def f(arena):
            reserve = partial(arena.reserve, owner=o)
            return reserve(1).value  # BAD
        """,
    "annotated function": """
        def make(arena) -> Reservation[Buffer]:
            return arena.reserve(1)

        def f(arena):
            make(arena)  # BAD
        """,
    "annotation in quotes and a module": """
        class Pool:
            def get(self) -> "reservation.Reservation[Buffer]":
                return self.arena.reserve(1)

        def f(pool):
            return pool.get().value  # BAD
        """,
    "function without an annotation": """
        def make(arena):
            return arena.reserve(1)

        def wrap(arena):
            return make(arena)

        def f(arena):
            return wrap(arena).value  # BAD
        """,
    "annotation hides it": """
        def make(arena) -> object:
            r = arena.reserve(1)
            return r

        make(arena)  # BAD
        """,
    "alias of the type": """
        from instrumentation.reservation import Reservation as R
        Result = Buffer | R[Buffer]

        def make() -> Result: ...

        def f():
            use(make())  # BAD
        """,
    "coroutine": """
        async def make(arena) -> Reservation[Buffer]:
            return arena.reserve(1)

        async def f(arena):
            (await make(arena)).value.free()  # BAD
        """,
    "optional reservation": """
        def make() -> Reservation[Buffer] | None: ...

        def f():
            r = make()
            if r is None:
                return None
            return r.value  # BAD
        """,
    "union passed on": """
        def prepare() -> Executable | Reservation[Overlay]: ...

        def f(run):
            executable = prepare()
            run(executable)  # BAD
        """,
    "union used": """
        def prepare() -> Executable | Reservation[Overlay]: ...

        def f():
            return prepare().views  # BAD
        """,
    "union narrowed the wrong way round": """
        def prepare() -> Executable | Reservation[Overlay]: ...

        def f(run):
            executable = prepare()
            if isinstance(executable, Reservation):
                run(executable)  # BAD
        """,
    "union stored": """
        def prepare() -> Executable | Reservation[Overlay]: ...

        class C:
            def f(self):
                self.executable = prepare()  # BAD
        """,
    "parameter": """
        def take(r: Reservation[Buffer]):
            return r.value  # BAD
        """,
    "parameter never looked at": """
        def ignore(r: Reservation[Buffer]):  # BAD
            return 3
        """,
    "container of reservations": """
        def make_all() -> list[Reservation[Buffer]]: ...

        def f():
            for r in make_all():
                r.value.free()  # BAD
        """,
    "tuple of reservations unpacked": """
        def both() -> tuple[Reservation[Buffer], Reservation[Buffer]]: ...

        def f():
            a, b = both()  # BAD
            return a.unwrap()
        """,
    "attribute that nothing checks": """
        class C:
            def __init__(self, arena):
                self.r = arena.reserve(1)  # BAD
        """,
    "attribute used in another method": """
        class C:
            def __init__(self, arena):
                self.r = arena.reserve(1)

            def use(self):
                return self.r.value  # BAD

            def check(self):
                return self.r.ok
        """,
    "attribute used as the memory": """
        class C:
            def __init__(self, arena):
                self.buffers = arena.reserve_all(requests)  # BAD

            def release(self):
                for buffer in self.buffers:  # BAD
                    buffer.free()
        """,
    "attribute declared as the memory": """
        class C:
            def __init__(self, arena):
                self.buffer: Buffer = arena.reserve(1)  # BAD
        """,
    "pair assignment": """
        def f(arena):
            a, b = arena.reserve(1), arena.reserve(2)  # BAD
            return a.unwrap()
        """,
    "alias": """
        def f(arena):
            a = arena.reserve(1)
            b = a
            return b.value  # BAD
        """,
    "getattr": """
        def f(arena):
            return getattr(arena.reserve(1), "value")  # BAD
        """,
    "logging it is no hand-over": """
        def f(arena):
            r = arena.reserve(1)  # BAD
            log.info("reserved", r=r)
        """,
    "f-string is no hand-over": """
        def f(arena):
            r = arena.reserve(1)  # BAD
            return f"{r}"
        """,
    "passed on and then used": """
        def f(arena, registry):
            r = arena.reserve(1)
            registry.watch(r)
            return r.value  # BAD
        """,
    "comment without a reason": """
        def f(arena):
            arena.reserve(1)  # lint: reserve-ok  # BAD
        """,
    "unrelated exit": """
        def f(arena):
            r = arena.reserve(1)  # BAD
            if done():
                sys.exit(1)
            return r.unwrap()
        """,
    "class without that method": """
        class Pool:
            pass

        def f(pool: Pool):
            pool.reserve(1)  # BAD
        """,
}


@pytest.mark.parametrize("snippet", SNIPPETS.values(), ids=SNIPPETS)
def test_reported_where_marked(snippet):
    text = dedent(snippet).replace("reserve-ok  # BAD", "reserve-ok")
    marked = [number for number, line in enumerate(dedent(snippet).splitlines(), 1) if "# BAD" in line]
    reports = lint_source(text).reports
    assert marked
    assert sorted({report.line for report in reports}) == marked, [str(report) for report in reports]
    assert {report.code for report in reports} == {"LNT001"}


def test_position_counts_characters_from_1():
    (report,) = lint_source('é = "é"; arena.reserve(1)\n', path="x.py").reports
    assert str(report).startswith("x.py:1:10: LNT001 the result of reserve() is discarded;")


def test_assert_is_named_as_the_cause():
    (report,) = lint_source("r = arena.reserve(1)\nassert r\nprint(r.value)\n").reports
    assert "python -O removes" in report.message


def test_both_reservations_of_a_line_are_reported():
    reports = lint_source("a, b = arena.reserve(1), arena.reserve(2)\n").reports
    assert [report.column for report in reports] == [8, 26]
