"""The MTP block's graph: recorded logits, chains of its own rows, what is written where, and who may read it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drafting import Drafter, drafter, with_aliases
from engines import DATA, DRAFT, TARGET, Array, World, decode, nmse, same_bits, world
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen35_f64 import Qwen35

from instrumentation.errors import FindingError
from instrumentation.levels import Level
from instrumentation.reservation import BufferRequest
from instrumentation.view import View
from refengine.architectures import BUILDERS, DRAFT_BUILDERS
from refengine.config_qwen35 import OPTIONAL_NEXTN
from refengine.context import Batch, Context, DecodeStatus
from refengine.executor import Arrays, Executable, Executor
from refengine.graph import BatchShape, ContextShape

NAMES = ("qwen35", "qwen35-tied", "qwen35-Q4_K_M", "qwen35moe")
CLOSE = 1e-10


@functools.cache
def model(name: str) -> Qwen35:
    return Qwen35(DATA / f"{name}.gguf")


@functools.cache
def recorded(name: str) -> dict[str, Array]:
    with np.load(DATA / f"{name}.npz") as data:
        return dict(data)


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, World]]:
    """A world of each model."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(world(name, threads=1, draft=True)) for name in NAMES}


@pytest.fixture(scope="module")
def dense(made: dict[str, World]) -> Iterator[Drafter]:
    with drafter(made["qwen35"], recorded("qwen35")["h_nextn"]) as drafts:
        yield drafts


def one_batch(drafts: Drafter, tokens: Array) -> Array:
    """Logits for (h[p], tokens[p + 1])."""
    drafts.forget()
    return drafts.run(tokens[1:], range(len(tokens) - 1))


# --- what is computed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("capture", [True, False])
def test_draft_logits_are_those_recorded_and_the_same_row_by_row(
    made: dict[str, World], name: str, capture: bool
):
    tokens, wanted = recorded(name)["tokens"], recorded(name)["mtp_logits"]
    with drafter(made[name], recorded(name)["h_nextn"], capture=capture) as drafts:
        together = one_batch(drafts, tokens)
        assert nmse(together, wanted) < CLOSE
        last = drafts.read(drafts.chain)[0]
        drafts.forget()
        for p, token in enumerate(tokens[1:]):
            assert same_bits(drafts.run([token], [p])[0], together[p]), p
        assert same_bits(drafts.read(drafts.chain)[0], last)


@settings(max_examples=15)
@given(data=st.data(), n_first=st.integers(1, 30), n_second=st.integers(1, 30))
def test_a_draft_row_has_the_same_bits_in_every_batch(
    dense: Drafter, data: st.DataObject, n_first: int, n_second: int
):
    """Two sequences, cut anywhere, of rows that are gathered from anywhere."""
    tokens = recorded("qwen35")["tokens"]
    wanted = one_batch(dense, tokens)
    dense.forget()
    left = [n_first, n_second]
    while any(left):
        counts = [data.draw(st.integers(0, n)) for n in left]
        if not any(counts):
            counts = [min(n, 1) for n in left]
        begin = [dense.cache.length(s) for s in range(2)]
        rows = [p for s in range(2) for p in range(begin[s], begin[s] + counts[s])]
        found = dense.run(tokens[1:][rows], rows, sequence=np.repeat([0, 1], counts).tolist())
        assert same_bits(found, wanted[rows])
        left = [n - count for n, count in zip(left, counts, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_chains_are_those_of_the_float64_model(made: dict[str, World], name: str):
    """Two sequences draft side by side, each from its own row of the chain; the first row of both goes with zeros."""
    tokens, hidden = recorded(name)["tokens"], recorded(name)["h_nextn"]
    lengths, n = (17, 30), 4
    wanted = [model(name).chain(tokens[:length], hidden.astype(np.float64), n) for length in lengths]
    with drafter(made[name], hidden) as drafts:
        logits = np.array(
            [
                drafts.run(tokens[:length], range(-1, length - 1), sequence=s, outputs=[length - 1])[0]
                for s, length in enumerate(lengths)
            ]
        )
        for step in range(n):
            for s in range(2):
                assert nmse(logits[s], wanted[s][1][step]) < CLOSE, (s, step)
            drafted = logits.argmax(axis=1)
            assert drafted.tolist() == [wanted[s][0][step] for s in range(2)]
            logits = drafts.run(drafted.tolist(), [-2, -3], sequence=[0, 1])


def test_the_chain_of_the_model_begins_as_its_drafts():
    built, tokens = model("qwen35"), recorded("qwen35")["tokens"][:9]
    hidden = built.hidden(tokens)
    drafted, logits = built.chain(tokens, hidden, 3)
    assert (drafted.shape, drafted.dtype) == ((3,), np.int32)
    assert logits.shape == (3, 320)
    rows = np.concatenate([np.zeros((1, hidden.shape[1])), hidden[:-1]])
    own = built.mtp_hidden(tokens, rows, np.arange(9))
    assert nmse(logits[0], built.mtp_logits(own)[-1]) < 1e-25
    assert drafted.tolist() == logits.argmax(axis=1).tolist()
    # The second step goes on from the block's row, not from the trunk's of the same position.
    longer, of_trunk = np.append(tokens, drafted[0]), np.concatenate([rows, hidden[-1:]])
    other = built.mtp_logits(built.mtp_hidden(longer, of_trunk, np.arange(10)))[-1]
    assert nmse(logits[1], other) > 1e-6


class _Wrong(Qwen35):
    """A model with one mistake in its MTP block."""

    def __init__(self, name: str, mistake: str) -> None:
        self.__dict__.update(model(name).__dict__)
        self.mistake = mistake
        key = f"blk.{self.n_layer}.nextn.eh_proj.weight"
        if mistake == "hidden first":
            projection = self.weights[key]
            self.weights = self.weights | {key: np.roll(projection, projection.shape[1] // 2, axis=1)}

    def hidden(self, tokens: Array) -> Array:
        return self.residual(tokens) if self.mistake == "pre-norm h" else super().hidden(tokens)

    def mtp_hnorm(self, hidden: Array) -> Array:
        return hidden if self.mistake == "no hnorm" else super().mtp_hnorm(hidden)


@pytest.mark.parametrize("name", NAMES)
def test_every_mistake_is_far_from_what_the_engine_computes(made: dict[str, World], name: str):
    tokens = recorded(name)["tokens"]
    with drafter(made[name], recorded(name)["h_nextn"]) as drafts:
        found = one_batch(drafts, tokens)
    assert nmse(found, _Wrong(name, "none").drafts(tokens)) < CLOSE
    for mistake in ("hidden first", "pre-norm h", "no hnorm"):
        wrong = _Wrong(name, mistake).drafts(tokens)
        assert nmse(wrong, model(name).drafts(tokens)) > 1e-4, mistake
        assert nmse(found, wrong) > 1e-4, mistake


def test_own_embeddings_and_head_are_used_where_the_file_has_them(made: dict[str, World]):
    """The trunk's two matrices in each other's place, as if the block had brought them."""
    tokens, hidden = recorded("qwen35")["tokens"], recorded("qwen35")["h_nextn"]
    of = {"embed_tokens": "output.weight", "shared_head_head": "token_embd.weight"}
    aliases = {f"blk.4.nextn.{name}.weight": weight for name, weight in of.items()}
    built = _Wrong("qwen35", "none")
    built.weights = built.weights | {name: built.weights[weight] for name, weight in aliases.items()}
    found = made["qwen35"]
    hybrid = found.config.hybrid
    assert hybrid is not None
    assert hybrid.nextn_tensors == ("shared_head_norm",)
    config = replace(found.config, hybrid=replace(hybrid, nextn_tensors=OPTIONAL_NEXTN))
    with with_aliases(found, aliases), drafter(found, hidden, config=config) as drafts:
        rows = one_batch(drafts, tokens)
    wanted = built.mtp_logits(
        built.mtp_hidden(tokens[1:], hidden[:-1].astype(np.float64), np.arange(1, len(tokens)))
    )
    assert nmse(rows, wanted) < CLOSE
    assert nmse(rows, recorded("qwen35")["mtp_logits"]) > 1e-2


def test_rows_of_the_chain_are_written_where_and_when_asked(dense: Drafter):
    tokens = recorded("qwen35")["tokens"]
    blank = np.full(dense.chain.shape, 7, np.float32)
    one_batch(dense, tokens[:6])
    last = dense.read(dense.chain)[0]
    dense.write(dense.chain, blank)
    dense.forget()
    assert dense.run(tokens[1:6], range(5), chain_rows=[-1] * 4 + [1], outputs=[]).shape == (0, 320)
    after = dense.read(dense.chain)
    assert same_bits(after[1], last), "kept although no logits are wanted"
    assert same_bits(after[0], blank[0])
    dense.run(tokens[6:7], [5], chain_rows=[-1])
    assert same_bits(dense.read(dense.chain), after)


def test_outputs_choose_rows(dense: Drafter):
    tokens = recorded("qwen35")["tokens"]
    wanted = one_batch(dense, tokens)
    dense.forget()
    assert same_bits(dense.run(tokens[1:], range(47), outputs=[3, 46]), wanted[[3, 46]])


# --- graph and weights


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_graph(made: dict[str, World], name: str):
    config = made[name].config
    graph = DRAFT_BUILDERS[config.architecture](config, ContextShape(2, 3, 5), BatchShape(4, 2, 1))
    inputs = [spec.name for spec in graph.tensors.values() if spec.kind == "input"]
    assert inputs == [
        "tokens", "position", "sequence", "cell", "pages", "output_rows", "hidden_rows", "chain_rows",
    ]  # fmt: skip
    outputs = {spec.name: spec.shape for spec in graph.tensors.values() if spec.kind == "output"}
    assert outputs == {"result_norm": (2, config.n_embd), "result_output": (2, config.n_vocab)}
    theirs = {
        "mtp_tok_embd-4", "mtp_enorm-4", "mtp_hnorm-4", "mtp_concat-4", "mtp_eh_proj-4", "mtp_attn_norm-4",
        "mtp_Qcur_full-4", "mtp_attn_out-4", "mtp_attn_residual-4", "mtp_attn_post_norm-4", "mtp_ffn_out-4",
        "mtp_post_ffn-4", "h_nextn",
    }  # fmt: skip
    assert theirs <= set(graph.tensors)
    assert {node.layer for node in graph.nodes} == {None, config.n_layer}
    buffers = {node.op: dict(node.buffers) for node in graph.nodes if node.buffers}
    assert buffers == {
        "gather_hidden": {"hidden": "hidden", "chain": "chain"},
        "scatter_rows": {"y": "chain"},
    }
    named = {weight for node in graph.nodes for weight in node.weights.values()}
    assert named <= set(made[name].weights.matrices | made[name].weights.vectors)
    unused = {weight for weight in made[name].weights.plan.shapes if weight.startswith("blk.4.")} - named
    assert unused == set()


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_the_block_are_matrices_and_vectors(made: dict[str, World], name: str):
    weights, n_embd = made[name].weights, made[name].config.n_embd
    projection = weights.matrices["blk.4.nextn.eh_proj.weight"]
    assert (projection.n_out, projection.n_in) == (n_embd, 2 * n_embd)
    for norm in ("enorm", "hnorm"):
        assert weights.vectors[f"blk.4.nextn.{norm}.weight"].shape == (n_embd,)


def test_a_context_shape_has_no_negative_number_of_rows():
    with pytest.raises(AssertionError):
        ContextShape(1, 1, -1)


# --- the trunk hands its rows over


class _HandingOver(Executor):
    """In the place of a context's executor: its graphs write rows to ``view`` [n_hidden, n_embd]."""

    def __init__(self, context: Context, view: View) -> None:
        of, config = context.executor, context.config
        pages = context.cache.shape.n_pages
        shape = ContextShape(context.settings.n_sequences, pages, view.shape[0])
        super().__init__(
            of.allocator, of.stream, of.owner, lambda batch: BUILDERS[config.architecture](config, shape, batch),
            replace(of.operations, buffers={"hidden": view}), capture=of.capture,
        )  # fmt: skip
        #: what rows of the next micro-batches go to
        self.rows: list[int] = []

    def run(self, executable: Executable, inputs: Arrays, outputs: Arrays) -> None:
        n = executable.graph.shape.n_tokens
        rows, self.rows = self.rows[:n], self.rows[n:]
        super().run(executable, {**inputs, "hidden_rows": np.array(rows, np.int32)}, outputs)


@contextmanager
def handing_over(
    made: World, n_hidden: int, **settings: Any
) -> Iterator[tuple[Context, _HandingOver, Callable[[], Array]]]:
    """A context, its executor, and what reads the buffer, which is NaN at first."""
    with ExitStack() as undo:
        context = made.context(n_sequences=2, **settings)
        undo.callback(made.contexts.remove, context)
        undo.callback(context.release)
        request = BufferRequest(4 * n_hidden * context.config.n_embd, TARGET, "hidden")
        size = made.allocator.arena_size([request])
        arena = made.allocator.reserve_arena(size, owner=TARGET, name="hidden").unwrap()
        undo.callback(arena.release)
        (buffer,) = arena.reserve_all([request]).unwrap()
        undo.callback(buffer.free)
        view = buffer.view(np.float32, (n_hidden, context.config.n_embd))
        context.stream.fill(view, 0xFF)
        executor = _HandingOver(context, view)
        executor.reserve(executor.nbytes(context.settings.worst_shapes))
        undo.callback(executor.release)
        undo.callback(setattr, context, "executor", context.executor)
        context.executor = executor

        def content() -> Array:
            array = np.empty(view.shape, np.float32)
            context.stream.copy_out(array, view)
            context.stream.synchronize()
            return array

        yield context, executor, content


@functools.cache
def plain(name: str) -> tuple[Array, Array]:
    """Logits and hidden rows of the recorded tokens from a context that hands nothing over."""
    with world(name, Level.OFF, threads=1) as alone:
        context = alone.context()
        assert context.decode(Batch.of(recorded(name)["tokens"], 0, 0, "all", hidden=True)) == DecodeStatus.OK
        return context.logits, context.hidden


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_ubatch", [32, 5])
def test_the_trunk_gives_the_same_bits_and_its_hidden_rows(made: dict[str, World], name: str, n_ubatch: int):
    tokens = recorded(name)["tokens"]
    logits, hidden = plain(name)
    order = np.random.default_rng(1).permutation(50)[:48]
    with handing_over(made[name], 50, n_ubatch=n_ubatch) as (context, executor, content):
        executor.rows = order.tolist()
        assert context.decode(Batch.of(tokens, 0, 0, "all", hidden=True)) == DecodeStatus.OK
        assert same_bits(context.logits, logits)
        assert same_bits(context.hidden, hidden)
        assert same_bits(content()[order], hidden)
        untouched = np.setdiff1d(np.arange(50), order)
        assert (content().view(np.uint32)[untouched] == 0xFFFFFFFF).all()
        assert nmse(content()[order], recorded(name)["h_nextn"]) < CLOSE


@pytest.mark.parametrize("outputs", ["none", "last"])
def test_hidden_rows_are_handed_over_whatever_logits_are_wanted(made: dict[str, World], outputs: str):
    tokens = recorded("qwen35")["tokens"]
    logits, hidden = plain("qwen35")
    with handing_over(made["qwen35"], 3) as (context, executor, content):
        executor.rows = [-1, 2, -5, 0] + [-1] * 7 + [1]
        assert context.decode(Batch.of(tokens[:12], 0, 0, outputs)) == DecodeStatus.OK
        assert same_bits(content(), hidden[[3, 11, 1]])
        assert same_bits(context.logits, logits[11:12] if outputs == "last" else logits[:0])
        executor.rows = [0]
        assert same_bits(decode(context, tokens[12:13].tolist())[0], logits[12])
        assert same_bits(content(), hidden[[12, 11, 1]])


def test_without_hidden_rows_the_trunk_is_as_it_was(made: dict[str, World]):
    config = made["qwen35"].config
    graph = BUILDERS["qwen35"](config, ContextShape(1, 2), BatchShape(4, 2, 1))
    assert "hidden_rows" not in graph.tensors
    assert "h_nextn" not in graph.tensors
    assert all(not node.buffers for node in graph.nodes)


def test_the_trunks_rows_feed_the_block_on_the_device(made: dict[str, World]):
    """The whole way: trunk, buffer, lease, block."""
    tokens = recorded("qwen35")["tokens"]
    with handing_over(made["qwen35"], 48) as (context, executor, content):
        executor.rows = list(range(48))
        assert context.decode(Batch.of(tokens, 0, 0, "none")) == DecodeStatus.OK
        with drafter(made["qwen35"], content()) as drafts:
            assert nmse(one_batch(drafts, tokens), recorded("qwen35")["mtp_logits"]) < CLOSE


# --- whose memory it is


@pytest.mark.parametrize("capture", [True, False])
def test_without_a_lease_a_launch_is_refused(capture: bool):
    tokens = recorded("qwen35")["tokens"]
    with (
        world("qwen35", threads=1, draft=True) as made,
        drafter(made, recorded("qwen35")["h_nextn"], capture=capture) as drafts,
    ):
        drafts.lease.end()
        for _ in range(2):
            with pytest.raises(FindingError, match="hidden") as refused:
                one_batch(drafts, tokens)
            found = refused.value.finding
            assert (found.code, found.kernel, found.argument) == ("OWN001", "gather_hidden", "hidden")
            assert (found.actor, found.buffer and found.buffer.owner) == ("draft", "target")
        made.findings.clear()
        with drafts.buffer.lend(to=DRAFT, mode="read"):
            assert nmse(one_batch(drafts, tokens), recorded("qwen35")["mtp_logits"]) < CLOSE
        # What ran before, or was captured, is refused as well when the lease is over.
        assert [bool(kept.captured) for kept in drafts.executor._executables.values()] == [capture]
        chain = drafts.read(drafts.chain)
        with pytest.raises(FindingError) as refused:
            one_batch(drafts, tokens[::-1])
        assert refused.value.finding.code == "OWN001"
        assert same_bits(drafts.read(drafts.chain), chain), "nothing ran"
        made.findings.clear()


def test_a_target_does_not_write_to_the_chain(made: dict[str, World]):
    with drafter(made["qwen35"], recorded("qwen35")["h_nextn"]) as drafts:
        assert not drafts.chain.buffer.permits(TARGET, "read")
        assert drafts.buffer.permits(DRAFT, "read")
        assert not drafts.buffer.permits(DRAFT, "write")
