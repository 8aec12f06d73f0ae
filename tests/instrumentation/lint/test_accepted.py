"""What the lint does not report."""

from __future__ import annotations

from textwrap import dedent

import pytest

from instrumentation.lint import lint_source

SNIPPETS = {
    "unwrap": """
        def f(arena):
            return arena.reserve(1).unwrap()
        """,
    "unwrap of a name": """
        def f(arena):
            r = arena.reserve(1)
            buffer = r.unwrap()
            return buffer
        """,
    "unwrap for the sake of the check": """
        def f(arena):
            r = arena.reserve(1)
            r.unwrap()
            return r.value
        """,
    "if ok": """
        def f(arena):
            r = arena.reserve(1)
            if r.ok:
                return r.value
            return None
        """,
    "if r": """
        def f(arena):
            r = arena.reserve(1)
            if r:
                return r.value
            return None
        """,
    "not ok returns": """
        def f(arena):
            r = arena.reserve(1)
            if not r.ok:
                return None
            return r.value
        """,
    "not ok raises": """
        def f(arena):
            r = arena.reserve(1)
            if not r:
                raise r.error
            return r.value
        """,
    "not ok continues": """
        def f(arena, sizes):
            for n in sizes:
                r = arena.reserve(n)
                if not r.ok:
                    continue
                r.value.free()
        """,
    "not ok breaks": """
        def f(arena, sizes):
            found = []
            for n in sizes:
                r = arena.reserve(n)
                if not r.ok:
                    break
                found.append(r.value)
            return found
        """,
    "not ok exits": """
        def f(arena):
            r = arena.reserve(1)
            if not r.ok:
                sys.exit(3)
            return r.value
        """,
    "not ok calls what never returns": """
        def fail() -> NoReturn: ...

        def f(arena):
            r = arena.reserve(1)
            r.ok or fail()
            return r.value
        """,
    "and": """
        def f(arena):
            r = arena.reserve(1)
            return r.ok and r.value
        """,
    "or": """
        def f(arena):
            r = arena.reserve(1)
            return not r.ok or r.value
        """,
    "conditional expression": """
        def f(arena):
            r = arena.reserve(1)
            return r.value if r.ok else None
        """,
    "either of two": """
        def f(arena, big):
            r = arena.reserve(2) if big else arena.reserve(1)
            if not r.ok:
                return None
            return r.value
        """,
    "each of two": """
        def f(arena):
            a = arena.reserve(1)
            if not a:
                raise a.error
            b = arena.reserve(2)
            if not b:
                a.value.free()
                raise b.error
            return a.value, b.value
        """,
    "swapped": """
        def f(arena):
            a, b = arena.reserve(1), arena.reserve(2)
            a, b = b, a
            return a.unwrap(), b.unwrap()
        """,
    "one known to have failed": """
        def f(arena):
            a = arena.reserve(2)
            if not a.ok:
                a = arena.reserve(1)
            return a.unwrap()
        """,
    "outcome in a name": """
        def f(arena):
            r = arena.reserve(1)
            ok = r.ok
            if not ok:
                return None
            return r.value
        """,
    "outcome compared": """
        def f(arena):
            r = arena.reserve(1)
            if r.ok is False:
                return None
            return r.value
        """,
    "bool": """
        def f(arena):
            r = arena.reserve(1)
            if bool(r):
                return r.value
            return None
        """,
    "error": """
        def f(arena):
            r = arena.reserve(1)
            if r.error is not None:
                raise r.error
            return r.value
        """,
    "error in a name": """
        def f(arena):
            r = arena.reserve(1)
            error = r.error
            if error:
                log.error(str(error))
                return None
            return r.value
        """,
    "error by walrus": """
        def f(arena):
            r = arena.reserve(1)
            if (error := r.error) is not None:
                raise error
            return r.value
        """,
    "walrus": """
        def f(arena):
            if r := arena.reserve(1):
                return r.value
            return None
        """,
    "walrus and ok": """
        def f(arena):
            if not (r := arena.reserve(1)).ok:
                return None
            return r.value
        """,
    "returned": """
        def f(arena):
            r = arena.reserve(1)
            return r
        """,
    "yielded": """
        def f(arena, sizes):
            for n in sizes:
                yield arena.reserve(n)
        """,
    "passed on": """
        def f(arena, take):
            take(arena.reserve(1))
        """,
    "outcome returned": """
        def f(arena):
            return arena.reserve(1).ok
        """,
    "outcome passed on": """
        def f(arena, book):
            book.note(arena.reserve(1).ok)
        """,
    "retry in a while loop": """
        def f(arena, n):
            r = arena.reserve(n)
            while not r.ok and n > 1:
                n //= 2
                r = arena.reserve(n)
            return r.unwrap()
        """,
    "until it succeeds": """
        def f(arena):
            while True:
                r = arena.reserve(1)
                if r.ok:
                    break
                wait()
            return r.value
        """,
    "for else": """
        def f(arena, sizes):
            for n in sizes:
                r = arena.reserve(n)
                if r.ok:
                    break
            else:
                return None
            return r.value
        """,
    "smaller after a failure": """
        def f(arena):
            r = arena.reserve(10)
            if not r.ok:
                r = arena.reserve(1)
                if not r.ok:
                    raise r.error
            return r.value
        """,
    "only sometimes": """
        def f(arena, wanted):
            r = None
            if wanted:
                r = arena.reserve(1)
            if r is None:
                return None
            return r.unwrap()
        """,
    "only sometimes, by truth": """
        def f(arena, wanted):
            r = None
            if wanted:
                r = arena.reserve(1)
            return r.value if r else None
        """,
    "handled": """
        def f(arena):
            try:
                return arena.reserve(1).unwrap()
            except OutOfMemoryError as error:
                log.error(str(error))
                return None
        """,
    "next size after a failure": """
        def f(arena, sizes):
            for n in sizes:
                try:
                    return arena.reserve(n).unwrap()
                except OutOfMemoryError:
                    continue
            return None
        """,
    "other errors may be ignored": """
        def f(arena):
            try:
                buffer = arena.reserve(1).unwrap()
            except ValueError:
                pass
        """,
    "handler of the reserving call itself": """
        def f(arena, n):
            try:
                r = arena.reserve(n)
            except BadInputError:
                return None
            return r.unwrap()
        """,
    "released when the second fails": """
        class C:
            def __init__(self, allocator, requests):
                self.arena = allocator.reserve_arena(1).unwrap()
                try:
                    self.buffers = self.arena.reserve_all(requests).unwrap()
                except BaseException:
                    self.arena.release()
                    raise
        """,
    "checked in finally": """
        def f(arena):
            r = arena.reserve(1)
            try:
                work()
            finally:
                if r.ok:
                    r.value.free()
        """,
    "in a with block": """
        def f(arena, lock):
            with lock:
                r = arena.reserve(1)
                if not r.ok:
                    return None
            return r.value
        """,
    "match on the outcome": """
        def f(arena):
            r = arena.reserve(1)
            match r.ok:
                case True:
                    return r.value
                case False:
                    return None
        """,
    "match on the reservation": """
        def f(arena):
            match arena.reserve(1):
                case Reservation(ok=True, value=buffer):
                    return buffer
                case Reservation(error=error):
                    raise error
        """,
    "match a union": """
        def prepare() -> Executable | Reservation[Overlay]: ...

        def f(run):
            match prepare():
                case Reservation(error=error):
                    log.error(str(error))
                case executable:
                    run(executable)
        """,
    "all of a list": """
        def f(arena, sizes):
            rs = [arena.reserve(n) for n in sizes]
            if not all(r.ok for r in rs):
                return None
            return [r.value for r in rs]
        """,
    "all itself": """
        def f(arena, sizes):
            rs = [arena.reserve(n) for n in sizes]
            return [r.value for r in rs] if all(rs) else None
        """,
    "any failed": """
        def f(arena, sizes):
            rs = [arena.reserve(n) for n in sizes]
            if any(not r.ok for r in rs):
                return None
            return [r.value for r in rs]
        """,
    "filtered": """
        def f(arena, sizes):
            rs = [arena.reserve(n) for n in sizes]
            return [r.value for r in rs if r.ok]
        """,
    "filtered by walrus": """
        def f(arena, sizes):
            return [r.value for n in sizes if (r := arena.reserve(n))]
        """,
    "loop over a list": """
        def f(arena, sizes):
            rs = [arena.reserve(n) for n in sizes]
            for r in rs:
                if not r.ok:
                    raise r.error
            return [r.value for r in rs]
        """,
    "enumerate and zip": """
        def f(arena, sizes):
            rs = [arena.reserve(n) for n in sizes]
            for i, r in enumerate(rs):
                if r:
                    use(i, r.value)
            for n, r in zip(sizes, rs):
                use(n, r.unwrap())
        """,
    "element by index": """
        def f(arena):
            rs = [arena.reserve(1), arena.reserve(2)]
            return rs[0].value if rs[0].ok else rs[1].unwrap()
        """,
    "unwrapped in a comprehension": """
        def f(arena, sizes):
            return [arena.reserve(n).unwrap() for n in sizes]
        """,
    "attribute checked at once": """
        class C:
            def __init__(self, arena):
                self.r = arena.reserve(1)
                if not self.r.ok:
                    raise self.r.error

            def use(self):
                return self.r.value
        """,
    "attribute checked where it is used": """
        class C:
            def __init__(self, arena):
                self.r = arena.reserve(1)

            def use(self):
                return self.r.value if self.r.ok else None
        """,
    "attribute checked elsewhere": """
        class C:
            def __init__(self, arena):
                self.r = arena.reserve(1)

        def use(c):
            return c.r.unwrap()
        """,
    "attribute handed on": """
        class C:
            def __init__(self, arena):
                self.r = arena.reserve(1)

            def take(self):
                return self.r
        """,
    "union narrowed by its class": """
        def prepare() -> Executable | Reservation[Overlay]: ...

        def f(run):
            executable = prepare()
            if not isinstance(executable, Executable):
                log.error(str(executable.error))
                return None
            return run(executable)
        """,
    "union narrowed by the reservation": """
        def prepare() -> Executable | Reservation[Overlay]: ...

        def f(run):
            executable = prepare()
            if isinstance(executable, Reservation):
                return None
            return run(executable.views)
        """,
    "union returned": """
        def prepare() -> Executable | Reservation[Overlay]: ...

        def f() -> Executable | Reservation[Overlay]:
            return prepare()
        """,
    "optional reservation": """
        def make() -> Optional[Reservation[Buffer]]: ...

        def f():
            r = make()
            if r is None or not r.ok:
                return None
            return r.value
        """,
    "parameter": """
        def take(r: Reservation[Buffer]) -> Buffer | None:
            return r.value if r.ok else None
        """,
    "protocol": """
        class Source(Protocol):
            def take(self, r: Reservation[Buffer]) -> None:
                \"\"\"Take it.\"\"\"
        """,
    "nested function after a check": """
        def f(arena):
            r = arena.reserve(1)
            if not r.ok:
                return None
            def later():
                return r.value
            return later
        """,
    "nested function before the check": """
        def f(arena):
            r = arena.reserve(1)
            def other():
                return 1
            if not r.ok:
                return other()
            return r.value
        """,
    "class in a function before the check": """
        def f(arena):
            r = arena.reserve(1)
            class C:
                def g(self):
                    return 1
            return r.unwrap(), C
        """,
    "module level": """
        r = allocator.reserve_arena(1)
        if not r.ok:
            raise SystemExit(3)
        arena = r.value
        """,
    "module level, checked in a function": """
        r = allocator.reserve_arena(1)

        def arena():
            return r.unwrap()
        """,
    "lambda that hands over": """
        def f(arena):
            make = lambda: arena.reserve(1)
            return make().unwrap()
        """,
    "reason": """
        def f(arena):
            arena.reserve(1)  # lint: reserve-ok the drop is what this test is about
        """,
    "reason at the end of a long call": """
        def f(arena):
            arena.reserve(
                1,
                name="x",
            )  # lint: reserve-ok the drop is what this test is about
        """,
    "another reserve, class known": """
        class Executor:
            def reserve(self, nbytes: int) -> None:
                self.arena = self.allocator.reserve_arena(nbytes).unwrap()

        class Context:
            def __init__(self):
                self.executor = Executor()
                self.executor.reserve(10)

        def f(executor: Executor):
            executor.reserve(10)
            made = Executor()
            made.reserve(10)
        """,
    "another reserve, by super": """
        class Base:
            def reserve(self, nbytes):
                self.nbytes = nbytes

        class Derived(Base):
            def reserve(self, nbytes):
                super().reserve(nbytes)
        """,
    "name of a foreign module": """
        import subprocess

        class Maker:
            def run(self) -> Reservation[Buffer]: ...

        subprocess.run(["ls"])
        """,
    "local name of a reserving function": """
        def make() -> Reservation[Buffer]: ...

        def f(make):
            make()
        """,
    "text and comments": """
        # arena.reserve(1)
        EXAMPLE = "arena.reserve(1)"
        """,
    "reservation of a table": """
        def reserve_table(n):
            return n

        reserve_table(4)
        """,
}


@pytest.mark.parametrize("snippet", SNIPPETS.values(), ids=SNIPPETS)
def test_accepted(snippet):
    reports = lint_source(dedent(snippet)).reports
    assert not reports, [str(report) for report in reports]
