"""Random programs, linted and then run: what the lint accepts never loses or misuses a reservation."""

from __future__ import annotations

from textwrap import indent

from hypothesis import HealthCheck, assume, given, settings, target
from hypothesis import strategies as st

from instrumentation.lint import lint_source

NAMES = st.sampled_from(["a", "b"])
N_RUNS = 24


class BoomError(Exception):
    pass


class OutOfMemoryError(Exception):
    pass


class TooLongError(Exception):
    pass


class Fake:
    """Counts what a real reservation would report."""

    def __init__(self, world):
        self.good = world.choose()
        self.looked = self.kept = False
        self.world = world

    @property
    def ok(self):
        self.looked = True
        return self.good

    def __bool__(self):
        return self.ok

    @property
    def error(self):
        self.looked = True
        return None if self.good else "no memory"

    @property
    def value(self):
        if not self.looked or not self.good:
            self.world.violations.append("value")
        return "memory"

    def unwrap(self):
        if not self.ok:
            raise OutOfMemoryError
        return "memory"


class World:
    """One run: ``bits`` decides what succeeds and which way unrelated conditions go."""

    def __init__(self, bits):
        self.bits = bits
        self.made = []
        self.violations = []
        self.steps = 0

    def choose(self):
        self.steps += 1
        if self.steps > 40:
            raise TooLongError
        self.bits, bit = self.bits >> 1, self.bits & 1
        return bool(bit)

    def reserve(self):
        self.made.append(Fake(self))
        return self.made[-1]

    def flag(self):
        return self.choose()

    def turns(self):
        while self.choose():
            yield None

    def boom(self):
        if self.choose():
            raise BoomError

    @staticmethod
    def keep(reservation):
        if isinstance(reservation, Fake):
            reservation.kept = True

    def run(self, code):
        scope = {
            "arena": self,
            "flag": self.flag,
            "turns": self.turns,
            "boom": self.boom,
            "keep": self.keep,
            "tick": self.choose,
        }
        scope |= {"use": lambda _: None, "BoomError": BoomError, "OutOfMemoryError": OutOfMemoryError}
        exec(code, scope)  # noqa: S102
        try:
            self.keep(scope["f"]())
        except (BoomError, OutOfMemoryError, TooLongError, AttributeError, NameError, TypeError):
            return
        if any(not (each.looked or each.kept) for each in self.made):
            self.violations.append("lost")


def conditions():
    simple = st.one_of(
        st.builds("{}.ok".format, NAMES),
        st.builds("not {}.ok".format, NAMES),
        NAMES,
        st.builds("not {}".format, NAMES),
        st.builds("{} is None".format, NAMES),
        st.builds("{0} is not None and {0}.ok".format, NAMES),
        st.builds("{}.error is None".format, NAMES),
        st.builds("({} := arena.reserve())".format, NAMES),
        st.sampled_from(["flag()", "ok", "not ok"]),
    )
    return st.recursive(
        simple,
        lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or"]), inner),
        max_leaves=3,
    )


def lines(*parts):
    return "\n".join(parts)


def block(text):
    return indent(text, "    ")


SIMPLE = st.one_of(
    st.builds("{} = arena.reserve()".format, NAMES),
    st.builds("{} = arena.reserve()".format, NAMES),
    st.builds("{} = arena.reserve()\nif not {}.ok:\n    return None".format, NAMES, NAMES),
    st.builds("use({}.value)".format, NAMES),
    st.builds("use({}.unwrap())".format, NAMES),
    st.builds("use({0}.value if {0} else None)".format, NAMES),
    st.builds("use({0}.ok and {0}.value)".format, NAMES),
    st.builds("keep({})".format, NAMES),
    st.builds("{} = {}".format, NAMES, NAMES),
    st.builds("ok = {}".format, conditions()),
    st.builds("if {0} is not None:\n    keep({0})".format, NAMES),
    st.builds("return {}".format, NAMES),
    st.builds("if {}:\n    {}".format, conditions(), st.sampled_from(["return None", "raise BoomError"])),
    st.sampled_from(["return None", "raise BoomError", "boom()", "a, b = b, a", "pass"]),
)


def compound(inner):
    body = st.lists(inner, min_size=1, max_size=4).map(lambda parts: block(lines(*parts)))
    in_loop = st.lists(
        st.one_of(
            inner, st.builds("if {}:\n    {}".format, conditions(), st.sampled_from(["break", "continue"]))
        ),
        min_size=1,
        max_size=4,
    ).map(lambda parts: block(lines(*parts)))
    error = st.sampled_from(["BoomError", "OutOfMemoryError", "(BoomError, OutOfMemoryError)"])
    return st.one_of(
        st.builds("if {}:\n{}".format, conditions(), body),
        st.builds("if {}:\n{}\nelse:\n{}".format, conditions(), body, body),
        st.builds("while {}:\n    tick()\n{}".format, conditions(), in_loop),
        st.builds("for _ in turns():\n{}".format, in_loop),
        st.builds("for _ in turns():\n{}\nelse:\n{}".format, in_loop, body),
        st.builds("try:\n{}\nexcept {}:\n{}".format, body, error, body),
        st.builds("try:\n{}\nfinally:\n{}".format, body, body),
        st.builds(
            "match {}.ok:\n    case True:\n{}\n    case _:\n{}".format,
            NAMES,
            body.map(block),
            body.map(block),
        ),
    )


PROGRAMS = st.lists(st.recursive(SIMPLE, compound, max_leaves=8), min_size=1, max_size=5).map(
    lambda parts: lines("def f():", block(lines("a = b = ok = None", *parts)), "")
)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(PROGRAMS, st.lists(st.integers(0, 2**40 - 1), min_size=N_RUNS, max_size=N_RUNS))
def test_accepted_programs_check_every_reservation(program, bits):
    assume("reserve" in program)
    reports = lint_source(program).reports
    target(float(program.count("reserve") - 10 * len(reports)))
    if not reports:
        code = compile(program, "<program>", "exec")
        for choice in [0, 2**40 - 1, *bits]:
            world = World(choice)
            world.run(code)
            assert not world.violations, program
