"""Random programs: what the detector refuses is exactly what a graph of all operations leaves unordered."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from racing import GRAPHS, CorePlayer, Step, parse_range

STREAMS = ("a", "b", "blocking")
EVENTS = ("e", "f")
RANGES = ("x", "x[0:8]", "x[7:20]", "x[8:16]", "y")
ARRAYS = ("h", "h[0:30]", "i")


def steps():
    stream, event = st.sampled_from(STREAMS), st.sampled_from(EVENTS)
    where, array = st.sampled_from(RANGES), st.sampled_from(ARRAYS)

    def step(who, verb, *words):
        return st.builds(lambda *parts: Step(parts[0], parts[1], tuple(parts[2:])), who, verb, *words)

    just, either = st.just, st.sampled_from
    access = step(stream, either(["read", "write", "read", "write", "free"]), where)
    return st.one_of(
        access, access, access, step(stream, just("replay"), either(list(GRAPHS))),
        step(stream, just("put"), array, where), step(stream, just("get"), where, array),
        step(just("default"), either(["read", "write"]), where),
        step(stream, either(["record", "wait"]), event), step(stream, either(["record", "wait"]), event),
        step(just("host"), just("waits"), event), step(just("host"), just("syncs"), stream),
        step(just("host"), just("syncs"), just("all")),
        step(just("host"), either(["reads", "writes", "frees"]), array),
        step(just("host"), just("frees"), where),
        step(event, just("destroy")), step(stream, just("destroy")),
    )  # fmt: skip


class Reference:
    """Every operation is a node; each stream, event and the host have the set of all nodes before them."""

    def __init__(self) -> None:
        self.n = 0
        #: destroyed streams keep their work; one of the same name made later is another stream
        self.generation: Counter[str] = Counter()
        self.behind: dict[str, set[int]] = {}
        self.landed: dict[str, set[int]] = {}
        self.host: set[int] = set()
        self.events: dict[str, tuple[set[int], set[int]]] = {}
        #: node, the stream whose copies it lands (or none), name, start, stop, whether it only reads
        self.accesses: list[tuple[int, str, str, int, int, bool]] = []

    def name(self, stream: str) -> str:
        return f"{stream}.{self.generation[stream]}"

    def enter(self, name: str) -> set[int]:
        known = self.behind.setdefault(name, set())
        known |= self.host
        for other, done in self.behind.items():
            kinds = {stream.partition(".")[0] for stream in (name, other)}
            if other != name and "default" in kinds and kinds <= {"default", "blocking"}:
                known |= done
        return known

    def conflicts(self, known: set[int], landing: str, name: str, start: int, stop: int, reads: bool) -> bool:
        return any(
            other == name and first < stop and start < last and not (reads and other_reads)
            and node not in known and not (of and of == landing)
            for node, of, other, first, last, other_reads in self.accesses
        )  # fmt: skip

    def do(self, step: Step) -> bool:
        """Whether the step is refused."""
        who, verb, words = step
        if verb == "destroy":
            self.events.pop(who, None)
            self.generation[who] += 1
        elif who == "host":
            return self.do_host(verb, words[0])
        elif verb == "record":
            name = self.name(who)
            self.events[words[0]] = (set(self.enter(name)), set(self.landed.get(name, ())))
        elif verb == "wait":
            known = self.enter(self.name(who))
            known |= self.events.get(words[0], (set(), set()))[0]
        else:
            return self.queue(self.name(who), verb, words)
        return False

    def do_host(self, verb: str, word: str) -> bool:
        if verb == "waits":
            self.host |= set().union(*self.events.get(word, ()))
        elif verb == "syncs":
            for stream in list(self.behind) if word == "all" else [self.name(word)]:
                self.host |= self.behind.get(stream, set()) | self.landed.get(stream, set())
        else:
            return self.conflicts(self.host, "", *parse_range(word), verb == "reads")
        return False

    def queue(self, name: str, verb: str, words: tuple[str, ...]) -> bool:
        known = self.enter(name)
        parts = GRAPHS[words[0]] if verb == "replay" else [(verb, words[0])]
        work = [("", *parse_range(where), part not in ("write", "free")) for part, where in parts]
        if verb == "put":
            work.append(("", *parse_range(words[1]), False))
        if verb == "get":
            work.append((name, *parse_range(words[1]), False))
        if any(self.conflicts(known, *each) for each in work):
            return True
        node, landing = self.n, self.n + 1
        self.n += 2
        self.accesses += [(landing if of else node, of, *rest) for of, *rest in work]
        known.add(node)
        if verb == "get":
            self.landed.setdefault(name, set()).add(landing)
        return False


@given(program=st.lists(steps(), max_size=40))
def test_what_is_refused_is_what_nothing_orders(program: list[Step]):
    player, reference = CorePlayer(), Reference()
    for i, step in enumerate(program):
        wanted = reference.do(step)
        conflict = player.do(step)
        assert (conflict is not None) == wanted, (i, step)
        if conflict is not None:
            assert conflict.start < conflict.stop
