"""Drafts never change what is said: right or wrong ones at every place, real ones, lost ones; and what they are."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from engines import DATA, Array, fill_all, nmse, same_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from qwen35_f64 import Qwen35
from scripted_drafter import ScriptedDrafter
from slots import ChosenFaults, Watch, Wish, alone, check_all, expect, loaded

import refengine
from refengine.batch import Batch
from refengine.config import ModelConfig
from refengine.context import DecodeStatus
from refengine.errors import ContextSizeError, RequestError, UnsupportedModelError
from refengine.gguf_file import GGUFFile
from refengine.options import EngineOptions
from refengine.request import Request
from refengine.speculative import DraftSettings, Feed, Guess, MtpDrafter

NAMES = ("qwen35", "qwen35-tied", "qwen35-Q4_K_M", "qwen35moe")
CLOSE = 1e-10


def drafting(name: str = "qwen35", **options) -> refengine.Engine:
    return loaded(name, **({"spec_type": "draft-mtp"} | options))


@functools.cache
def recorded(name: str) -> dict[str, Array]:
    with np.load(DATA / f"{name}.npz") as data:
        return dict(data)


def drafter_of(engine: refengine.Engine) -> MtpDrafter:
    drafter = engine.scheduler.drafter
    assert isinstance(drafter, MtpDrafter)
    return drafter


def drafted_throughout(request: Request) -> bool:
    """Behind each token but the last two there was a draft, or an accepted one."""
    return request.draft.blocks + request.draft.accepted >= len(request.tokens) - 2


# --- what is computed


@pytest.mark.parametrize("name", NAMES)
def test_vectors_are_those_recorded_with_drafts_on(name: str):
    wanted = recorded(name)
    tokens = wanted["tokens"].tolist()
    with drafting(name, check="guard") as engine:
        assert nmse(engine.logits(tokens), wanted["logits"]) < CLOSE
        assert nmse(engine.hidden(tokens), wanted["h_nextn"]) < CLOSE
        drafts = engine.draft_logits(tokens)
        assert drafts.shape == (len(tokens) - 1, engine.config.n_vocab)
        assert nmse(drafts, wanted["mtp_logits"]) < CLOSE
        generation = engine.generate(tokens, n_predict=32, temperature=0)
        assert generation.tokens == wanted["greedy"].tolist()
        assert generation.draft.generated > 30, "nothing was drafted"
        assert same_bits(engine.draft_logits(tokens), drafts), "a generation before changes nothing"
        assert engine.check_integrity() == []
        assert engine.findings == []


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(1, 1), (2, 1), (5, 3), (13, 13), (2048, 7), (16, 2)])
def test_draft_logits_have_the_same_bits_in_every_batch(n_batch: int, n_ubatch: int):
    tokens = recorded("qwen35")["tokens"].tolist()
    with drafting() as engine:
        wanted = engine.draft_logits(tokens)
    with drafting(n_batch=n_batch, n_ubatch=n_ubatch, check="guard") as engine:
        assert same_bits(engine.draft_logits(tokens), wanted)
        assert same_bits(engine.draft_logits(tokens[:2]), wanted[:1])
        assert engine.findings == []


def test_draft_logits_that_make_no_sense_are_refused():
    with (
        loaded() as engine,
        pytest.raises(RequestError, match=r"no draft context; load .* spec_type draft-mtp"),
    ):
        engine.draft_logits([1, 2])
    with drafting(n_ctx=64) as engine:
        with pytest.raises(RequestError, match="one token gives no draft logits; give at least two"):
            engine.draft_logits([1])
        with pytest.raises(RequestError, match="the prompt is empty"):
            engine.draft_logits([])
        with pytest.raises(RequestError, match="token 320 is out of range"):
            engine.draft_logits([1, 320])
        with pytest.raises(ContextSizeError, match=r"request \(65 tokens\) exceeds"):
            engine.draft_logits([1] * 65)


def test_models_without_an_mtp_head_are_refused():
    with pytest.raises(
        UnsupportedModelError, match=r"spec_type draft-mtp: this model \(llama\) has no MTP head"
    ):
        loaded("llama", spec_type="draft-mtp")
    with GGUFFile.open(DATA / "qwen35.gguf") as gguf:
        config = ModelConfig.from_gguf(gguf)
    assert config.hybrid is not None
    bare = replace(config, hybrid=replace(config.hybrid, n_nextn=0, nextn_tensors=()))
    assert len(EngineOptions().context_plans(bare)) == 1
    with pytest.raises(
        UnsupportedModelError, match=r"this model \(qwen35\) has no MTP head; use spec_type none"
    ):
        EngineOptions(spec_type="draft-mtp").context_plans(bare)


# --- drafts of which a chosen part is right


def edges() -> Iterator[tuple[int, int, dict]]:
    """Prompt length, tokens to predict, options: drafts from the first token on, over every kind of edge."""
    yield 1, 24, {}
    yield 2, 12, {"n_batch": 9, "n_ubatch": 9}
    yield 26, 14, {}  # over a page edge
    yield 31, 12, {}
    yield 32, 12, {"n_batch": 11, "n_ubatch": 10}
    yield 33, 12, {"n_ubatch": 9}
    yield 250, 14, {"n_batch": 64, "n_ubatch": 32}  # over a span edge
    yield 256, 12, {}


@pytest.mark.parametrize("n_max", [1, 3, 8])
@pytest.mark.parametrize(("n_prompt", "n_predict", "options"), list(edges()))
def test_any_number_of_right_drafts_at_every_edge(n_prompt: int, n_predict: int, options: dict, n_max: int):
    wish = Wish.of(0, n_prompt, n_predict)
    with drafting(n_ctx=288, draft_n_max=n_max, check="guard", **options) as engine:
        for right in range(n_max + 1):
            watch = Watch(engine)
            before = engine.scheduler.statistics.draft
            drafts = ScriptedDrafter(engine, "qwen35", [wish], lambda _p, n, right=right: min(n, right))
            watch.ask(wish)
            watch.run()
            expect("qwen35", wish, watch.requests[0], 288)
            found = watch.requests[0].draft
            assert found.generated == sum(n for _, n, _ in drafts.made)
            assert found.accepted == sum(good for _, _, good in drafts.made)
            assert found.blocks == len(drafts.made)
            assert engine.scheduler.statistics.draft == before + found
            # Draft and token behind it: as few steps as can be.
            assert len(drafts.made) >= (n_predict - 2) // (right + 1)
            assert drafts.made[0][0] == n_prompt + 1
            if right == n_max:
                assert len(drafts.made) <= -(-(n_predict - 1) // (right + 1)) + 1
            assert drafts.hidden_rows >= n_prompt
            engine.drop_prefixes()
        assert engine.check_integrity() == []
        assert engine.findings == []


@settings(max_examples=15)
@given(data=st.data(), n_prompt=st.integers(1, 70), n_max=st.integers(1, 8), n_predict=st.integers(1, 40))
def test_a_text_of_accidents(data: st.DataObject, n_prompt: int, n_max: int, n_predict: int):
    """Each draft has its own number of right tokens."""
    wish = Wish.of(1, n_prompt, n_predict)
    counts = data.draw(st.lists(st.integers(0, n_max), min_size=1, max_size=12))
    with drafting(draft_n_max=n_max, n_ubatch=data.draw(st.integers(n_max + 1, 40))) as engine:
        watch = Watch(engine)
        drafts = ScriptedDrafter(engine, "qwen35", [wish], lambda p, n: min(n, counts[p % len(counts)]))
        watch.ask(wish)
        watch.run()
        check_all("qwen35", watch, [wish])
        assert watch.requests[0].draft.accepted == sum(right for _, _, right in drafts.made)


@pytest.mark.parametrize("n_ctx", [50, 64])
@pytest.mark.parametrize("left", [0, 1, 2, 8, 14])
@pytest.mark.parametrize("right", [0, 1, 4])
def test_drafts_end_with_the_context(n_ctx: int, left: int, right: int):
    """The error comes with the same text as without drafts; what fits exactly completes. Also within a page."""
    n_prompt = n_ctx - left
    fits, exceeds = Wish.of(2, n_prompt, left + 1), Wish.of(2, n_prompt, left + 2)
    with drafting(n_ctx=n_ctx, draft_n_max=4, check="guard") as engine:
        for wish in (fits, exceeds):
            watch = Watch(engine)
            ScriptedDrafter(engine, "qwen35", [exceeds], lambda _p, n: min(n, right))
            watch.ask(wish)
            watch.run()
            assert watch.requests[0].status == ("done" if wish is fits else "failed")
            expect("qwen35", wish, watch.requests[0], n_ctx)
            assert engine.scheduler.statistics.retries == 0, "more was drafted than can be"
            engine.drop_prefixes()
        assert engine.findings == []


@pytest.mark.parametrize("end", range(1, 9))
@pytest.mark.parametrize("right", [0, 2, 8])
def test_an_end_of_generation_in_the_middle_of_drafts(end: int, right: int):
    """What was drafted behind the end is neither said nor kept, and the slot's prefix is good for the next request."""
    said = alone("qwen35", Wish.of(0, 30, 16)).tokens
    eos = said[end]
    end = said.index(eos)
    wish = Wish.of(0, 30, 16, ignore_eos=False)
    follow = Wish((*wish.prompt, *said[: end + 1], 5, 6), 6)
    with drafting(draft_n_max=8, override_kv={"tokenizer.ggml.eos_token_id": eos}, check="guard") as engine:
        watch = Watch(engine)
        ScriptedDrafter(engine, "qwen35", [Wish.of(0, 30, 16), follow], lambda _p, n: min(n, right))
        first = watch.ask(wish)
        watch.run()
        assert first.tokens == said[: end + 1]
        assert first.generation().finish_reason == "stop"
        assert same_bits(first.generation().logits, alone("qwen35", Wish.of(0, 30, 16)).logits[: end + 1])
        assert engine.context.length(0) == 30 + end
        second = watch.ask(follow)
        watch.run()
        assert engine.scheduler.statistics.reused_tokens == 30 + end - 1
        expect("qwen35", follow, second, 128)
        watch.check()
        assert engine.check_integrity() == []


# --- drafts in several slots


WISHES = st.lists(
    st.builds(
        Wish.of,
        st.integers(0, 2),
        st.integers(1, 40),
        st.integers(1, 24),
        temperature=st.sampled_from([0.0, 0.8]),
        seed=st.integers(1, 2),
        ignore_eos=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)
OPTIONS = st.fixed_dictionaries(
    {
        "n_slots": st.integers(1, 4),
        "draft_n_max": st.integers(1, 8),
        "n_batch": st.integers(1, 40),
        "n_ubatch": st.integers(1, 40),
        "n_ctx": st.sampled_from([40, 64, 96, 160]),
        "kv_unified": st.booleans(),
        "check": st.sampled_from(["off", "guard"]),
        "cuda_graphs": st.booleans(),
        "worst_case_reserve": st.booleans(),
    }
)


def run_all(name: str, wishes: list[Wish], options: dict, script: Callable[[int, int], int] | None) -> None:
    with drafting(name, **options) as engine:
        wishes = [wish for wish in wishes if len(wish.prompt) <= engine.settings.n_ctx]
        watch = Watch(engine)
        if script is not None:
            ScriptedDrafter(engine, name, wishes, script)
        watch.run(iter(wishes))
        check_all(name, watch, wishes)
        engine.drop_prefixes()
        free = engine.context.cache
        assert free.free_pages == free.shape.n_pages
        assert engine.draft is not None
        assert engine.draft.cache.free_pages == engine.draft.cache.shape.n_pages
        if script is None:
            assert drafter_of(engine).failures == 0, "there is always room for drafts"


@settings(max_examples=30)
@given(wishes=WISHES, options=OPTIONS, script=st.lists(st.integers(0, 8), min_size=1, max_size=6))
@example(
    wishes=[Wish.of(text, 3, 20) for text in range(3)],
    options={"n_slots": 3, "draft_n_max": 5, "n_batch": 9, "n_ubatch": 9, "n_ctx": 160},
    script=[5, 0, 3],
)
def test_drafts_of_any_rightness_change_nothing(wishes: list[Wish], options: dict, script: list[int]):
    run_all("qwen35", wishes, options, lambda p, n: min(n, script[p % len(script)]))


@settings(max_examples=20)
@given(wishes=WISHES, options=OPTIONS)
def test_real_drafts_change_nothing(wishes: list[Wish], options: dict):
    run_all("qwen35", wishes, options, None)


@settings(max_examples=5)
@given(wishes=WISHES, options=OPTIONS)
def test_real_drafts_of_experts_change_nothing(wishes: list[Wish], options: dict):
    run_all("qwen35moe", wishes, options, None)


# --- the drafts themselves


@dataclass
class ChainSpy:
    """Every draft that an engine makes, with the logits of which it was made, by what it follows."""

    drafter: MtpDrafter
    #: whether they are verified: if not, there is a draft behind every token
    verify: bool = True
    rows: dict[int, list[Array]] = field(default_factory=dict)
    chains: dict[tuple[int, ...], tuple[list[int], Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        decode, draft = self.drafter.context.decode, self.drafter.draft

        def watched_decode(batch: Batch) -> DecodeStatus:
            status = decode(batch)
            assert batch.hidden_rows is not None
            given = zip(batch.sequence[batch.outputs], batch.hidden_rows[batch.outputs], strict=True)
            if status == DecodeStatus.OK:
                for (sequence, row), logits in zip(given, self.drafter.context.logits, strict=True):
                    known = self.rows.setdefault(int(sequence), [])
                    if row >= -1:  # the target's: a draft begins anew
                        known.clear()
                    known.append(logits.copy())
            return status

        def watched_draft(
            wanted: Mapping[int, int], histories: Mapping[int, Sequence[int]]
        ) -> dict[int, list[int]]:
            made = draft(wanted, histories)
            for sequence, drafts in made.items():
                assert len(drafts) == wanted[sequence]
                logits = np.array(self.rows[sequence][: len(drafts)])
                self.chains[tuple(histories[sequence])] = drafts, logits
            return made if self.verify else {}

        self.drafter.context.decode = watched_decode  # type: ignore[method-assign]
        self.drafter.draft = watched_draft  # type: ignore[method-assign]


def chains_of(
    name: str, wishes: Sequence[Wish], *, warm: Sequence[Wish] = (), verify: bool = True, **options
) -> tuple[ChainSpy, Watch]:
    """Drafts while ``wishes`` run together, after ``warm`` ran."""
    with drafting(name, **options) as engine:
        watch = Watch(engine)
        spy = ChainSpy(drafter_of(engine), verify)
        for wish in warm:
            watch.ask(wish)
        watch.run()
        spy.chains.clear()
        for wish in wishes:
            watch.ask(wish)
        watch.run()
        check_all(name, watch, [*warm, *wishes])
    return spy, watch


@pytest.mark.parametrize(
    ("name", "n_prompt"), [("qwen35", 1), ("qwen35", 33), ("qwen35-tied", 20), ("qwen35moe", 7)]
)
def test_drafts_of_a_generation_are_those_of_the_float64_model(name: str, n_prompt: int):
    model = Qwen35(DATA / f"{name}.gguf")
    spy, _ = chains_of(name, [Wish.of(0, n_prompt, 13)], verify=False, draft_n_max=8)
    lengths = [len(history) for history in spy.chains]
    assert lengths == list(range(n_prompt + 1, n_prompt + 12)), (
        "a draft behind each generated token but the last two"
    )
    hidden = model.hidden(np.array(max(spy.chains, key=len)))
    for history in list(spy.chains)[::2]:
        drafts, logits = spy.chains[history]
        assert len(drafts) == min(8, n_prompt + 13 - len(history) - 1)
        wanted, wanted_logits = model.chain(np.array(history), hidden, len(drafts))
        assert drafts == wanted.tolist()
        assert nmse(logits, wanted_logits) < CLOSE


def assert_same_chains(found: ChainSpy, wanted: ChainSpy) -> None:
    """Each draft has the bits of the fresh engine's, as far as it goes."""
    assert found.chains
    for history, (drafts, logits) in found.chains.items():
        fresh, fresh_logits = wanted.chains[history]
        n = min(len(drafts), len(fresh))
        assert drafts[:n] == fresh[:n], len(history)
        assert same_bits(logits[:n], fresh_logits[:n]), len(history)


def fresh_chains(name: str, wishes: Sequence[Wish]) -> ChainSpy:
    """Of every token of each request, alone in an engine of its own."""
    merged, _ = chains_of(name, [wishes[0]], draft_n_max=5, verify=False)
    for wish in wishes[1:]:
        merged.chains |= chains_of(name, [wish], draft_n_max=5, verify=False)[0].chains
    return merged


@pytest.mark.parametrize("options", [{"n_batch": 7, "n_ubatch": 6}, {"n_ubatch": 16}], ids=str)
def test_drafts_after_a_preemption_are_those_of_a_fresh_engine(options: dict):
    wishes = [Wish.of(0, 30, 30), Wish.of(1, 25, 30), Wish.of(2, 5, 30)]
    spy, watch = chains_of("qwen35", wishes, n_slots=3, n_ctx=96, draft_n_max=5, check="guard", **options)
    assert watch.engine.scheduler.statistics.preemptions
    assert_same_chains(spy, fresh_chains("qwen35", wishes))


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_drafts_after_a_prefix_was_reused_are_those_of_a_fresh_engine(name: str):
    first = Wish.of(0, 20, 9)
    text = (*first.prompt, *alone(name, first).tokens)
    # All but its last token is held; what diverges by one token can be rolled back to, too.
    further, diverging = Wish((*text, 7, 8, 9), 9), Wish((*text[:-2], 3, 4), 9)
    for wish in (further, diverging):
        spy, watch = chains_of(name, [wish], warm=[first], draft_n_max=5)
        assert watch.engine.scheduler.statistics.reused_tokens >= len(text) - 3
        assert_same_chains(spy, fresh_chains(name, [wish]))


@pytest.mark.parametrize("p_min", [0.1, 0.3, 1.0])
def test_drafts_end_where_they_are_not_sure(p_min: float):
    """The probability is that among the ten likeliest tokens."""
    wish = Wish.of(0, 20, 12)
    spy, _ = chains_of("qwen35", [wish], draft_n_max=5)
    with drafting(draft_n_max=5, draft_p_min=p_min) as engine:
        watch, drafter = Watch(engine), drafter_of(engine)
        made: dict[tuple[int, ...], list[int]] = {}
        draft = drafter.draft

        def watched(
            wanted: Mapping[int, int], histories: Mapping[int, Sequence[int]]
        ) -> dict[int, list[int]]:
            drafts = draft(wanted, histories)
            made[tuple(histories[0])] = drafts.get(0, [])
            return drafts

        drafter.draft = watched  # type: ignore[method-assign]
        watch.ask(wish)
        watch.run()
        check_all("qwen35", watch, [wish])
    for history, (drafts, logits) in spy.chains.items():
        best = np.sort(logits.astype(np.float64), axis=1)[:, ::-1][:, :10]
        sure = 1.0 / np.exp(best - best[:, :1]).sum(axis=1) >= p_min
        n = len(sure) if sure.all() else int(np.argmin(sure))
        assert made[history] == drafts[:n]


def test_drafts_that_are_too_short_are_not_verified():
    wish = Wish.of(0, 20, 12)
    with drafting(draft_n_max=4, draft_n_min=3) as engine:
        watch = Watch(engine)
        request = watch.ask(wish)
        watch.run()
        check_all("qwen35", watch, [wish])
        # The last three tokens have room for fewer drafts.
        assert request.draft.blocks == 12 - 1 - 3
        assert request.draft.generated >= 3 * request.draft.blocks


def test_a_guess_is_the_likeliest_token_of_lowest_id():
    row = np.zeros(300, np.float32)
    assert Guess.of(row) == Guess(0, 0.1)
    row[[7, 9]] = 50.0
    assert Guess.of(row).token == 7
    assert Guess.of(row).probability == pytest.approx(0.5)
    assert Guess.of(row[:8]).probability == pytest.approx(1.0)
    row[3] = np.nan
    assert not Guess.of(row).probability >= 0.0


@pytest.mark.parametrize("wrong", [{"n_max": -1}, {"n_min": -1}, {"p_min": 1.5}, {"p_min": float("nan")}])
def test_settings_of_drafts_have_limits(wrong: dict):
    with pytest.raises(AssertionError):
        DraftSettings(**wrong)


@pytest.mark.parametrize("fill", [0x3E, 0xFF])
@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_what_lay_in_memory_does_not_matter(name: str, fill: int):
    """Also to the drafts; and again between requests, when nothing is held."""
    wishes = [Wish.of(0, 30, 12), Wish.of(1, 5, 12), Wish.of(2, 1, 12)]
    fresh = fresh_chains(name, wishes)
    with drafting(name, n_slots=3, draft_n_max=5, n_ubatch=16) as engine:
        watch, spy = Watch(engine), ChainSpy(drafter_of(engine))
        for _ in range(2):
            engine.drop_prefixes()
            fill_all(engine, fill)
            for wish in wishes:
                watch.ask(wish)
            watch.run()
        check_all(name, watch, wishes * 2)
        assert_same_chains(spy, fresh)


# --- lost drafts


def counted(start: int, every: int, *parts: str) -> Callable[[str, str], bool]:
    """Sites whose kind and detail contain all of ``parts``: the ``start``-th, and then each ``every``-th."""
    seen = 0

    def chosen(kind: str, detail: str) -> bool:
        nonlocal seen
        if not all(part in f"{kind} {detail}" for part in parts):
            return False
        seen += 1
        return seen >= start and (seen - start) % every == 0

    return chosen


SITES = [
    ("reserve", "draft/compute"),
    ("record on target",),
    ("wait on draft",),
    ("copy_in", "on draft"),
    ("copy_out", "on draft"),
    ("launch", "on draft"),
    ("replay on draft",),
    ("begin_capture on draft",),
]


@pytest.mark.parametrize("start", [1, 2, 5])
@pytest.mark.parametrize("site", SITES, ids=" ".join)
def test_a_failure_of_the_draft_context_costs_drafts_alone(site: tuple[str, ...], start: int):
    wishes = [Wish.of(0, 30, 20), Wish.of(1, 12, 20), Wish.of(2, 3, 10), Wish.of(0, 25, 6)]
    faults = ChosenFaults()
    options = {"n_slots": 3, "faults": faults, "worst_case_reserve": False, "check": "guard", "n_ubatch": 16}
    with drafting("qwen35", cuda_graphs=site[0] != "launch", **options) as engine:
        watch, drafter = Watch(engine), drafter_of(engine)
        faults.chosen = counted(start, 11, *site)
        watch.run(iter(wishes))
        faults.chosen = None
        check_all("qwen35", watch, wishes)
        events = [line["event"] for line in watch.lines]
        assert faults.fired
        assert drafter.failures == len(faults.fired)
        reported = [
            event for event in events if event.startswith(("failed to", "hidden states were not handed"))
        ]
        assert len(reported) == drafter.failures
        # Anew: drafts again.
        engine.drop_prefixes()
        again = watch.ask(wishes[0])
        watch.run()
        assert drafted_throughout(again)
        expect("qwen35", wishes[0], again, 128)
        assert engine.check_integrity() == []


def test_what_could_not_be_fed_together_is_fed_one_by_one():
    wishes = [Wish.of(text, 9, 12) for text in range(3)]
    faults = ChosenFaults()
    with drafting(n_slots=3, n_ctx=192, faults=faults) as engine:
        watch, drafter = Watch(engine), drafter_of(engine)
        requests = [watch.ask(wish) for wish in wishes]
        for n in range(1, 4):
            feed = drafter.feed

            def once(feeds: Sequence[Feed], feed: Callable[[Sequence[Feed]], None] = feed) -> None:
                assert len(feeds) == 3
                faults.chosen = counted(1, 1 << 30, "replay on draft")
                feed(feeds)
                faults.chosen = None

            drafter.feed = once  # type: ignore[method-assign]
            watch.step()
            drafter.feed = feed  # type: ignore[method-assign]
            assert drafter.failures == n
        watch.run()
        check_all("qwen35", watch, wishes)
        assert all(drafted_throughout(request) for request in requests)


def test_a_sequence_that_lost_its_drafts_goes_on_without_until_it_starts_anew():
    wish = Wish.of(0, 30, 12)
    faults = ChosenFaults()
    with drafting("qwen35", faults=faults) as engine:
        watch, drafter = Watch(engine), drafter_of(engine)
        request = watch.ask(wish)
        watch.step()
        watch.step()
        assert drafter.context.length(0)
        faults.chosen = lambda _kind, detail: "replay on draft" in detail
        watch.step()
        faults.chosen = None
        assert drafter.context.length(0) == 0
        blocks = request.draft.blocks
        watch.run()
        assert request.draft.blocks == blocks
        assert drafter.failures == 2, "the chain, then what was fed"
        assert [line["event"] for line in watch.lines if "draft" in line["event"]] == [
            "draft ends early", "draft lost, going on without"
        ]  # fmt: skip
        # The prefix of a sequence without drafts is not worth keeping.
        again = watch.ask(wish)
        watch.run()
        assert drafted_throughout(again)
        check_all("qwen35", watch, [wish, wish])


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_error_out_of_the_draft_context_reaches_who_drives_and_drafts_go_on_anew(at: int):
    """What is no failure of the device, such as an error in ``on_finding``, passes; nothing is torn by it."""
    wish = Wish.of(0, 30, 16)
    fresh = fresh_chains("qwen35", [wish])
    with drafting("qwen35", draft_n_max=4) as engine:
        watch = Watch(engine)
        request = watch.ask(wish)
        watch.step()
        watch.step()
        drafter = drafter_of(engine)
        decode, calls = drafter.context.decode, 0

        def fails(batch: Batch) -> DecodeStatus:
            nonlocal calls
            calls += 1
            if calls == at:
                raise ValueError("on purpose")
            return decode(batch)

        drafter.context.decode = fails  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="on purpose"):
            engine.drive()
        engine.check_integrity()
        draft = drafter.draft

        def watched(
            wanted: Mapping[int, int], histories: Mapping[int, Sequence[int]]
        ) -> dict[int, list[int]]:
            made = draft(wanted, histories)
            for sequence, drafts in made.items():
                assert drafts == fresh.chains[tuple(histories[sequence])][0][: len(drafts)], "old drafts"
            return made

        drafter.draft = watched  # type: ignore[method-assign]
        generated = request.draft.generated
        while not request.ended:
            engine.drive()
        expect("qwen35", wish, request, 128)
        assert (request.draft.generated > generated) == (at < 4), "lost if what is known was not fed"
        again = watch.ask(wish)
        watch.run()
        assert drafted_throughout(again)
        expect("qwen35", wish, again, 128)


def test_rows_that_are_not_finite_give_no_drafts(monkeypatch: pytest.MonkeyPatch):
    wish = Wish.of(0, 30, 12)
    with drafting("qwen35") as engine:
        watch, drafter = Watch(engine), drafter_of(engine)
        monkeypatch.setattr(Guess, "of", classmethod(lambda cls, _logits: cls(0, float("nan"))))
        request = watch.ask(wish)
        watch.run()
        check_all("qwen35", watch, [wish])
        assert request.draft.generated == 0
        assert drafter.failures == 0
