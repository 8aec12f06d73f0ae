"""Executables: captured once per batch shape, bounded in number, equal to plain launches."""

import numpy as np
import pytest
from engines import World, decode, same_bits, world

from instrumentation.errors import BadInputError
from refengine.batch import Batch
from refengine.context import Context, DecodeStatus
from refengine.executor import MAX_EXECUTABLES
from refengine.graph import BatchShape

NAMES = {"tokens", "position", "sequence", "cell", "pages", "output_rows"}
TOKENS = np.random.default_rng(3).integers(0, 320, 60).tolist()


@pytest.fixture(scope="module")
def made():
    with world("llama") as guarded:
        yield guarded


@pytest.fixture
def context(made: World):
    context = made.context()
    yield context
    made.contexts.remove(context)
    context.release()


def shapes(context: Context) -> list[BatchShape]:
    return list(context.executor._executables)


@pytest.mark.parametrize("n_tokens", [1, 2, 31])
def test_a_captured_graph_equals_plain_launches(made: World, n_tokens: int):
    results = []
    for capture in (True, False):
        context = made.context(capture=capture)
        results.append([decode(context, TOKENS[i * n_tokens : (i + 1) * n_tokens]) for i in range(2)])
    for captured, plain in zip(*results, strict=True):
        assert same_bits(captured, plain)


def test_inputs_are_copied_at_once(context: Context, monkeypatch: pytest.MonkeyPatch):
    copies = []
    copy_in = context.stream.copy_in
    monkeypatch.setattr(
        context.stream, "copy_in", lambda view, array: copies.append(view.name) or copy_in(view, array)
    )
    decode(context, TOKENS[:5])
    decode(context, TOKENS[5:6])
    assert copies == ["compute.inputs", "compute.inputs"]


def test_each_input_is_an_exact_view_of_what_is_copied(context: Context):
    decode(context, TOKENS[:5])
    (executable,) = context.executor._executables.values()
    views = {name: executable.views[name] for name in ("tokens", "position", "cell", "pages", "output_rows")}
    assert {view.buffer for view in views.values()} == {executable.inputs.buffer}
    assert [view.offset % 64 for view in views.values()] == [0] * 5
    assert views["tokens"].shape == views["output_rows"].shape == (5,)
    assert views["pages"].shape == (1, 2)
    for view in views.values():
        with pytest.raises(BadInputError, match=f"view {view.name} has rows 0 to {view.shape[0] - 1}, not"):
            view.row(view.shape[0])
    last = views["output_rows"]
    assert last.offset + last.nbytes == executable.inputs.buffer.nbytes
    found = np.empty(5, np.int32)
    context.stream.copy_out(found, views["tokens"])
    context.stream.synchronize()
    assert found.tolist() == TOKENS[:5]


def test_inputs_that_are_not_the_graph_s_are_refused(context: Context):
    decode(context, TOKENS[:2])
    (executable,) = context.executor._executables.values()
    given = {name: np.zeros(view.shape, np.int32) for name, view in executable.views.items() if name in NAMES}
    executable.fill(given)
    for wrong in ({}, {**given, "more": np.zeros(2, np.int32)}, {**given, "tokens": np.zeros(1, np.int32)}):
        with pytest.raises(AssertionError, match="tokens"):
            executable.fill(wrong)


def test_a_shape_is_captured_once(context: Context, monkeypatch: pytest.MonkeyPatch):
    captures = []
    end = context.stream.end_capture
    monkeypatch.setattr(context.stream, "end_capture", lambda name: captures.append(name) or end(name))
    for token in TOKENS[:10]:
        decode(context, [token])
    decode(context, TOKENS[10:12], outputs="last")
    assert captures == ["target 1x1x1", "target 2x1x1"]
    assert shapes(context) == [BatchShape(1, 1, 1), BatchShape(2, 1, 1)]


def test_without_capture_nothing_is_captured(made: World, monkeypatch: pytest.MonkeyPatch):
    context = made.context(capture=False)
    monkeypatch.setattr(context.stream, "begin_capture", None)
    decode(context, TOKENS[:3])


def test_the_oldest_shapes_go(context: Context):
    rows = {}
    for n in range(1, 25):
        context.cache.remove(0)
        rows[n] = decode(context, TOKENS[:n])
        assert len(shapes(context)) <= MAX_EXECUTABLES
    assert [shape.n_tokens for shape in shapes(context)] == list(range(25 - MAX_EXECUTABLES, 25))
    # What was used last stays longest; a shape that went is captured again and computes the same.
    context.cache.remove(0)
    decode(context, TOKENS[:9])
    context.cache.remove(0)
    assert same_bits(decode(context, TOKENS[:1]), rows[1])
    assert BatchShape(9, 9, 1) in shapes(context)
    assert BatchShape(10, 10, 1) not in shapes(context)
    for n in (24, 3, 12):
        context.cache.remove(0)
        assert same_bits(decode(context, TOKENS[:n]), rows[n])


def test_executables_hold_no_memory_beyond_the_arena(made: World, context: Context):
    before = made.allocator.snapshot().reserved
    for n in range(1, 20):
        context.cache.remove(0)
        decode(context, TOKENS[:n])
    assert made.allocator.snapshot().reserved == before
    assert len(context.executor.arena.overlays) == MAX_EXECUTABLES
    buffers = [buffer for overlay in context.executor.arena.overlays.values() for buffer in overlay.buffers]
    assert all(buffer.pins for buffer in buffers)


def test_a_context_has_a_bounded_number_of_positions(context: Context):
    decode(context, TOKENS[:60])
    assert context.decode(Batch.of(TOKENS[:5], 60, 0, "last")) == DecodeStatus.INVALID_BATCH
    decode(context, TOKENS[:4])
    assert context.decode(Batch.of(TOKENS[:1], 64, 0, "last")) == DecodeStatus.INVALID_BATCH
