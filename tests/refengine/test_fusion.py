"""Fused graphs compute the bits of the graphs that they were made from, in fewer launches."""

from collections import Counter

import numpy as np
import pytest
from engines import DATA, PAIRS, decode, same_bits, world
from hypothesis import given, settings
from hypothesis import strategies as st

from refengine.architectures import BUILDERS, DRAFT_BUILDERS
from refengine.config import ModelConfig
from refengine.fusion import fused
from refengine.gguf_file import GGUFFile
from refengine.graph import BatchShape, ContextShape, Graph


def built(name: str, shape: BatchShape, *, draft: bool = False, n_hidden: int = 0) -> Graph:
    with GGUFFile.open(DATA / f"{name}.gguf") as gguf:
        config = ModelConfig.from_gguf(gguf)
    build = DRAFT_BUILDERS if draft else BUILDERS
    return build[config.architecture](config, ContextShape(2, 16, n_hidden), shape)


@pytest.mark.parametrize("name", PAIRS)
def test_every_batch_has_the_same_bits(name: str):
    """One row, a tile and part of one, a row that begins the second span, and rows of both; two sequences."""
    rng = np.random.default_rng(len(name))
    with world(name) as made:
        plain, *joined = (
            made.context(**fuse, n_ctx=512, n_batch=300, n_ubatch=100, n_sequences=2)
            for fuse in ({"fuse": False}, {}, {"fewest_launches": True})
        )
        for sequence, n in ((0, 1), (1, 7), (0, 1), (0, 254), (1, 1), (0, 1), (0, 6), (1, 4)):
            tokens = rng.integers(0, made.config.n_vocab, n).tolist()
            outputs = "all" if n < 100 else "last"
            wanted = decode(plain, tokens, sequence, outputs).copy()
            for context in joined:
                assert same_bits(decode(context, tokens, sequence, outputs), wanted), (sequence, n)


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


def launches(graph: Graph, layer: int) -> int:
    """Nodes of one layer: those whose results, or cache, are the layer's."""
    end = f"-{layer}"
    return sum(
        any(name.endswith(end) for name in node.results) or (node.layer == layer and not node.results)
        for node in graph.nodes
    )


#: launches of a layer of one token: as built, joined, and fewest; layers 0 of qwen35 are gated delta nets, 3 attention
COUNTS = {
    ("llama", 0): (17, 12, 6),
    ("qwen3", 0): (19, 12, 6),
    ("qwen35", 0): (17, 14, 7),
    ("qwen35", 3): (20, 12, 6),
    ("qwen35moe", 0): (25, 22, 13),
    ("qwen35moe", 3): (28, 20, 12),
}
ONE = BatchShape(1, 1, 1)


@pytest.mark.parametrize(("name", "layer"), COUNTS)
def test_launches_of_a_layer(name: str, layer: int):
    graph = built(name, ONE)
    graphs = (graph, fused(graph), fused(graph, fewest=True))
    assert tuple(launches(each, layer) for each in graphs) == COUNTS[name, layer]


@pytest.mark.parametrize(("name", "counts"), [("qwen35", (30, 20, 14)), ("qwen35moe", (38, 28, 20))])
def test_launches_of_the_block_that_drafts(name: str, counts: tuple[int, ...]):
    graph = built(name, ONE, draft=True, n_hidden=4)
    graphs = (graph, fused(graph), fused(graph, fewest=True))
    assert tuple(len(each.nodes) for each in graphs) == counts


SHAPES = st.integers(1, 40).flatmap(
    lambda n: st.builds(BatchShape, st.just(n), st.integers(0, n), st.integers(1, 3))
)


@settings(max_examples=40)
@given(
    name=st.sampled_from(["llama", "qwen3", "qwen35", "qwen35moe"]),
    shape=SHAPES,
    hidden=st.booleans(),
    draft=st.booleans(),
    fewest=st.booleans(),
)
def test_what_goes_has_one_reader_and_is_no_output(
    name: str, shape: BatchShape, hidden: bool, draft: bool, fewest: bool
):
    hybrid = name.startswith("qwen35")
    graph = built(name, shape, draft=draft and hybrid, n_hidden=shape.n_tokens if hidden and hybrid else 0)
    joined = fused(graph, fewest=fewest)
    assert joined.shape == graph.shape
    for tensor in joined.tensors:
        assert joined.tensors[tensor] == graph.tensors[tensor]
    read = Counter(tensor for node in graph.nodes for tensor in node.tensors.values())
    writers = {tensor: node.op for node in graph.nodes for tensor in node.results}
    for tensor in graph.tensors.keys() - joined.tensors.keys():
        assert graph.tensors[tensor].kind == "compute"
        # A norm's result may have several readers, when they all are one node with it.
        assert read[tensor] == 1 or (fewest and writers[tensor] == "rms_norm")
    # Every tensor is written before it is read, once; weights, caches and buffers are those that there were.
    known = {tensor for tensor, spec in joined.tensors.items() if spec.kind == "input"}
    for node in joined.nodes:
        assert known.issuperset(node.tensors.values())
        assert known.isdisjoint(node.results)
        known.update(node.results)
    assert known == joined.tensors.keys()

    def used(of: Graph) -> list[str]:
        return sorted(weight for node in of.nodes for weight in node.weights.values())

    assert used(joined) == used(graph)
    for part in ("layer", "buffers"):
        assert {str(getattr(node, part)) for node in joined.nodes} == {
            str(getattr(node, part)) for node in graph.nodes
        }


def chain(**changes) -> Graph:
    """A product and its residual sum."""
    options = {"kind": "compute", "again": False} | changes
    graph = Graph(BatchShape(2, 0, 1))
    x = graph.input("x", (2, 32), "tokens", np.float32)
    y = graph.add("mul_mat", "y", (2, 32), {"x": x}, weights={"weight": "w"}, kind=options["kind"])
    total = graph.add("add", "total", (2, 32), {"a": x, "b": y}, kind="output")
    if options["again"]:
        graph.add("add", "more", (2, 32), {"a": total, "b": y}, kind="output")
    return graph


def test_a_tensor_that_is_wanted_stays():
    assert ops(fused(chain())) == {"mul_mat_add": 1}
    for graph in (chain(kind="output"), chain(again=True)):
        assert fused(graph).nodes == graph.nodes
        assert fused(graph).tensors == graph.tensors


def test_attention_over_several_spans_keeps_its_stages():
    assert ops(fused(built("qwen35", BatchShape(1, 1, 2))))["attention_merge"] == 1
    assert ops(fused(built("qwen35", ONE)))["attention_merge"] == 0


def test_more_products_of_one_x_than_a_kernel_takes():
    graph = Graph(BatchShape(2, 0, 1))
    x = graph.input("x", (2, 32), "tokens", np.float32)
    for i in range(6):
        graph.add("mul_mat", f"y{i}", (2, 32), {"x": x}, weights={"weight": f"w{i}"}, kind="output")
    joined = fused(graph, fewest=True)
    assert [node.results for node in joined.nodes] == [("y0", "y1", "y2", "y3"), ("y4", "y5")]
