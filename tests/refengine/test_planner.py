"""Plans: no two tensors that live at once share memory, and the worst shape covers every other one."""

import functools
import itertools
from collections.abc import Callable

import pytest
from engines import DATA, TARGET
from hypothesis import given
from hypothesis import strategies as st

from instrumentation.redzones import Redzones
from refengine.architectures import BUILDERS, DRAFT_BUILDERS
from refengine.config import ModelConfig
from refengine.context_plan import MAX_OUTPUTS, ContextPlan, ContextSettings
from refengine.fusion import fused
from refengine.gguf_file import GGUFFile
from refengine.graph import BatchShape, ContextShape, Graph
from refengine.kernels.select import CANDIDATES
from refengine.planner import Plan, plan

MODELS = ("llama", "qwen3", "qwen35", "qwen35moe")


def n_best_of(n_outputs: int) -> st.SearchStrategy[int]:
    return st.sampled_from((0, *CANDIDATES) if n_outputs else (0,))


SHAPES = st.integers(1, 80).flatmap(
    lambda n: st.integers(0, min(n, MAX_OUTPUTS)).flatmap(
        lambda n_outputs: st.builds(
            BatchShape, st.just(n), st.just(n_outputs), st.integers(1, 5), n_best_of(n_outputs)
        )
    )
)


@functools.cache
def config(name: str) -> ModelConfig:
    with GGUFFile.open(DATA / f"{name}.gguf") as gguf:
        return ModelConfig.from_gguf(gguf)


def context_settings(**changes) -> ContextSettings:
    defaults = {
        "n_ctx": 128,
        "n_batch": 128,
        "n_ubatch": 80,
        "n_sequences": 1,
        "cache_type_k": "f32",
        "cache_type_v": "f32",
        "capture": True,
    }
    return ContextSettings(**(defaults | changes))


def build(name: str, shape: BatchShape, **changes) -> Graph:
    return ContextPlan(config(name), context_settings(**changes)).graph(shape)


def check(graph: Graph, made: Plan) -> None:
    """Run the graph's accesses over the plan: each read finds what was last written for it."""
    content: dict[int, str] = {}
    check_inputs(graph, made)
    for spec in graph.tensors.values():
        if spec.kind != "input":
            assert made.requests[made.place[spec.name]].nbytes == spec.nbytes
    for node in graph.nodes:
        for name in node.tensors.values():
            assert name in made.inputs or content[made.place[name]] == name
        assert len({made.place[name] for name in node.results}) == len(node.results)
        for result in node.results:
            assert made.place[result] not in [made.place[name] for name in node.tensors.values()]
            content[made.place[result]] = result
    for spec in graph.tensors.values():
        if spec.kind == "output":
            assert content[made.place[spec.name]] == spec.name


def check_inputs(graph: Graph, made: Plan) -> None:
    """Inputs, and nothing else, have one buffer: apart from each other, to its end."""
    names = [spec.name for spec in graph.tensors.values() if spec.kind == "input"]
    assert list(made.inputs) == names
    (place,) = {made.place[name] for name in names}
    assert [name for name, at in made.place.items() if at == place] == names
    spans = sorted((made.inputs[name], made.inputs[name] + graph.tensors[name].nbytes) for name in names)
    assert spans[0][0] == 0
    assert spans[-1][1] == made.requests[place].nbytes
    for (_, stop), (start, _) in itertools.pairwise(spans):
        assert stop <= start < stop + 64
        assert start % 64 == 0


@given(name=st.sampled_from(MODELS), shape=SHAPES, fuse=st.booleans(), fewest=st.booleans())
def test_every_read_finds_its_tensor(name: str, shape: BatchShape, fuse: bool, fewest: bool):
    graph = build(name, shape, fuse=fuse, fewest_launches=fewest)
    check(graph, plan(graph, TARGET))


@given(
    name=st.sampled_from(["qwen35", "qwen35moe"]),
    builders=st.sampled_from([BUILDERS, DRAFT_BUILDERS]),
    shape=SHAPES,
    rewrite=st.sampled_from([lambda graph: graph, fused, functools.partial(fused, fewest=True)]),
    data=st.data(),
)
def test_graphs_that_hand_rows_over(
    name: str, builders: dict, shape: BatchShape, rewrite: Callable[[Graph], Graph], data: st.DataObject
):
    """Reads find their tensors, no persistent buffer is planned, and a smaller shape needs no more memory."""

    def build_one(batch: BatchShape) -> Graph:
        return rewrite(builders[name](config(name), ContextShape(2, 4, 80), batch))

    graph = build_one(shape)
    made = plan(graph, TARGET)
    check(graph, made)
    assert not {"hidden", "chain"} & {request.name.split(".")[-1] for request in made.requests}
    n_tokens = data.draw(st.integers(1, shape.n_tokens))
    n_outputs = data.draw(st.integers(0, min(n_tokens, shape.n_outputs)))
    n_best = shape.n_best if n_outputs else 0
    smaller = BatchShape(n_tokens, n_outputs, data.draw(st.integers(1, shape.n_spans)), n_best)
    assert plan(build_one(smaller), TARGET).nbytes <= made.nbytes


SETTINGS = st.builds(
    context_settings,
    n_ctx=st.one_of(st.integers(1, 100), st.integers(200, 5000)),
    n_batch=st.integers(1, 100),
    n_ubatch=st.integers(1, 100),
    n_sequences=st.integers(1, 3),
    fuse=st.booleans(),
    fewest_launches=st.booleans(),
    chooses=st.booleans(),
)


@given(name=st.sampled_from(MODELS), chosen=SETTINGS, redzone=st.sampled_from([0, 256, 4096]), data=st.data())
def test_the_worst_shapes_cover_every_batch(
    name: str, chosen: ContextSettings, redzone: int, data: st.DataObject
):
    of_shape = ContextPlan(config(name), chosen).graph
    zones = Redzones(redzone)

    def nbytes(shape: BatchShape) -> int:
        return sum(zones.block_nbytes(request.nbytes) for request in plan(of_shape(shape), TARGET).requests)

    cells = -(-chosen.n_ctx // 32) * 32
    n_tokens = data.draw(
        st.integers(1, min(chosen.n_ubatch, chosen.n_batch, cells, chosen.n_ctx * chosen.n_sequences))
    )
    n_outputs = data.draw(st.integers(0, min(n_tokens, MAX_OUTPUTS)))
    n_spans = chosen.n_spans(data.draw(st.integers(1, chosen.n_ctx)))
    n_best = data.draw(n_best_of(n_outputs)) if chosen.chooses else 0
    assert nbytes(BatchShape(n_tokens, n_outputs, n_spans, n_best)) <= max(
        nbytes(shape) for shape in chosen.worst_shapes
    )


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_shared_between_layers(name: str):
    graph = build(name, BatchShape(8, 1, 1))
    made = plan(graph, TARGET)
    assert made.nbytes == sum(request.nbytes for request in made.requests)
    assert made.nbytes < 0.5 * sum(spec.nbytes for spec in graph.tensors.values())
    assert len({request.name for request in made.requests}) == len(made.requests)
    assert all(request.owner == TARGET for request in made.requests)


def test_a_tensor_of_chance_size_does_not_share():
    # As many outputs as tokens: the rows of both have one size.
    graph = build("llama", BatchShape(4, 4, 1))
    made = plan(graph, TARGET)
    rows = {name: graph.tensors[name].rows for name in made.place}
    for place in {at for name, at in made.place.items() if name not in made.inputs}:
        assert len({rows[name] for name, at in made.place.items() if at == place}) == 1


def test_a_prefix_is_part_of_every_name_of_a_result():
    graph = Graph(BatchShape(2, 1, 1), prefix="mtp_")
    graph.input("a", (2, 4), "tokens")
    others = {"index": ("chosen", (2, 1), "int32")}
    assert graph.add("add", "sum", (2, 4), {"a": "a"}, others=others, buffers={"y": "kept"}) == "mtp_sum"
    (node,) = graph.nodes
    assert node.results == ("mtp_sum", "mtp_chosen")
    assert dict(node.buffers) == {"y": "kept"}
    assert set(graph.tensors) == {"a", "mtp_sum", "mtp_chosen"}


def test_an_operation_reads_what_is_in_the_graph():
    graph = Graph(BatchShape(2, 1, 1))
    with pytest.raises(AssertionError, match="nowhere is not in the graph yet"):
        graph.add("add", "sum", (2, 4), {"a": "nowhere"})
    graph.input("a", (2, 4), "tokens")
    with pytest.raises(AssertionError, match="tensor a is in the graph already"):
        graph.input("a", (2, 4), "tokens")
    with pytest.raises(AssertionError, match="has not as many rows as tokens"):
        graph.add("add", "sum", (3, 4), {"a": "a", "b": "a"})


def test_dead_results_give_their_memory_back():
    graph = Graph(BatchShape(2, 0, 1))
    graph.input("a", (2, 4), "tokens")
    for i in range(3):
        graph.add("add", f"unused {i}", (2, 4), {"a": "a", "b": "a"})
    made = plan(graph, TARGET)
    assert len(made.requests) == 2
    assert len({made.place[f"unused {i}"] for i in range(3)}) == 1


def test_candidates_take_the_place_of_logits_among_the_outputs():
    outputs = {}
    for n_best in (0, 16):
        graph = build("llama", BatchShape(4, 3, 1, n_best))
        outputs[n_best] = {
            spec.name: (spec.shape, spec.dtype.name)
            for spec in graph.tensors.values()
            if spec.kind == "output"
        }
    norm = {"result_norm": ((3, 64), "float32")}
    assert outputs[0] == {**norm, "result_output": ((3, 320), "float32")}
    assert outputs[16] == {**norm, "result_best": ((3, 33), "int32")}


@pytest.mark.parametrize("shape", [(0, 0, 1), (1, 2, 1), (1, -1, 1), (1, 0, 1, 16), (1, 1, 1, -1)])
def test_shapes_that_cannot_be(shape: tuple[int, ...]):
    with pytest.raises(AssertionError):
        BatchShape(*shape)


def test_shapes_have_names():
    assert [str(BatchShape(5, 2, 1)), str(BatchShape(5, 2, 1, 16))] == ["5x2x1", "5x2x1 best 16"]
