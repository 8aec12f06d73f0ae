"""Join operations of a graph into fewer, larger ones that compute the same bits.

On a GPU the step of one token is bound by how many small kernels follow one another. Architectures build graphs of
elementary operations, whose tensors can be dumped and compared; ``fused`` finds chains of them for which there is one
kernel. A tensor that disappears in it has exactly one reader and is no output.
"""

from __future__ import annotations

from collections import defaultdict
from types import MappingProxyType
from typing import TYPE_CHECKING

from refengine.graph import Graph, Node
from refengine.kernels.products import MAX_PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from refengine.graph import Setting


def fused(graph: Graph, *, fewest: bool = False) -> Graph:
    """The graph with fewer nodes, the same inputs and outputs, and the same bits in each tensor that is left.

    ``fewest``: also where that takes more arithmetic, or kernels that take the host's compiler seconds, for devices on
    which launches are what a step waits for.
    """
    rewriting = _Rewriting(graph)
    for op, rewrite, always in _PATTERNS:
        if not (always or fewest):
            continue
        for place in range(len(graph.nodes)):
            node = rewriting.nodes[place]
            if node is not None and node.op == op:
                rewrite(rewriting, place, node)
    return rewriting.result()


class _Rewriting:
    """Nodes by place, of which some have gone, with who writes and who reads each tensor."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node | None] = list(graph.nodes)
        #: tensor -> place of the node that writes it; inputs have none
        self.writer: dict[str, int] = {}
        #: tensor -> places of the nodes that read it, once for each role
        self.readers: defaultdict[str, list[int]] = defaultdict(list)
        for place, node in enumerate(graph.nodes):
            self._enter(place, node)

    def _enter(self, place: int, node: Node) -> None:
        for name in node.results:
            self.writer[name] = place
        for name in node.tensors.values():
            self.readers[name].append(place)

    def _leave(self, place: int) -> None:
        node = self.nodes[place]
        assert node is not None, f"place {place} is empty"
        self.nodes[place] = None
        for name in node.results:
            del self.writer[name]
        for name in node.tensors.values():
            self.readers[name].remove(place)

    def source(self, name: str, *ops: str) -> tuple[int, Node] | None:
        """Place and node of one of these operations whose only result ``name`` has one reader and can disappear."""
        if self.graph.tensors[name].kind != "compute" or len(self.readers[name]) != 1:
            return None
        found = self.written_by(name, *ops)
        return None if found is None or found[1].others else found

    def written_by(self, name: str, *ops: str) -> tuple[int, Node] | None:
        """Place and node that writes a tensor, if it is one of these operations."""
        place = self.writer.get(name)
        node = None if place is None else self.nodes[place]
        return None if place is None or node is None or node.op not in ops else (place, node)

    def replace(self, places: Sequence[int], place: int, node: Node) -> None:
        """Put one node where the node of ``place`` was, for those of ``places``."""
        assert place in places, (place, places)
        for old in places:
            self._leave(old)
        self.nodes[place] = node
        self._enter(place, node)

    def result(self) -> Graph:
        """The graph of what is left."""
        graph = self.graph
        tensors = {
            name: spec for name, spec in graph.tensors.items() if spec.kind == "input" or name in self.writer
        }
        nodes = [node for node in self.nodes if node is not None]
        return Graph(graph.shape, graph.rows, graph.prefix, nodes, tensors)


def _node(
    op: str,
    tensors: Mapping[str, str],
    output: str | None,
    *,
    weights: Mapping[str, str] | None = None,
    settings: Mapping[str, Setting] | None = None,
    layer: int | None = None,
    others: Mapping[str, str] | None = None,
) -> Node:
    return Node(
        op,
        MappingProxyType(dict(tensors)),
        output,
        MappingProxyType(dict(weights or {})),
        MappingProxyType(dict(settings or {})),
        layer,
        MappingProxyType(dict(others or {})),
        MappingProxyType({}),
    )


def _attention_whole(rewriting: _Rewriting, place: int, node: Node) -> None:
    """Attention over the only span, then the merge of one."""
    found = rewriting.source(node.tensors["spans"], "attention")
    if found is not None and rewriting.graph.shape.n_spans == 1:
        at, first = found
        _, n_head, _, _ = rewriting.graph.tensors[node.tensors["spans"]].shape
        settings = {**first.settings, "n_head": n_head}
        joined = _node("attention_whole", first.tensors, node.output, settings=settings, layer=first.layer)
        rewriting.replace((at, place), place, joined)


def _attention_gated(rewriting: _Rewriting, place: int, node: Node) -> None:
    """Attention over the only span, then the output gate of each head."""
    found = rewriting.source(node.tensors["x"], "attention_whole")
    if found is not None:
        at, whole = found
        tensors = {**whole.tensors, "q_gate": node.tensors["q_gate"]}
        joined = _node("attention_whole", tensors, node.output, settings=whole.settings, layer=whole.layer)
        rewriting.replace((at, place), place, joined)


def _rope_store(rewriting: _Rewriting, place: int, node: Node) -> None:
    """RoPE of queries and of keys, before them the norms of their heads, and the store into the layer's cache."""
    k = rewriting.source(node.tensors["k"], "rope")
    readers = [other for other in rewriting.nodes[place + 1 :] if other is not None and "q" in other.tensors]
    q = rewriting.written_by(readers[0].tensors["q"], "rope") if readers else None
    if k is None or q is None or q[0] > place or readers[0].layer != node.layer:
        return
    if k[1].settings["pairing"] != q[1].settings["pairing"]:
        return
    places = [q[0], k[0], place]
    tensors = {
        "q": q[1].tensors["x"],
        "k": k[1].tensors["x"],
        "v": node.tensors["v"],
        "cell": node.tensors["cell"],
    }
    tensors["position"] = q[1].tensors["position"]
    settings = {"pairing": q[1].settings["pairing"], "n_head": q[1].settings["n_head"]}
    weights = {}
    norms = _head_norms(rewriting, q[1], k[1])
    if norms is not None:
        (at_q, norm_q), (at_k, norm_k) = norms
        places += [at_q, at_k]
        tensors |= {"q": next(iter(norm_q.tensors.values())), "k": norm_k.tensors["x"]}
        weights = {"q": norm_q.weights["weight"], "k": norm_k.weights["weight"]}
        settings["eps"] = norm_q.settings["eps"]
    joined = _node("rope_store", tensors, q[1].output, weights=weights, settings=settings, layer=node.layer)
    rewriting.replace(places, place, joined)


def _head_norms(rewriting: _Rewriting, q: Node, k: Node) -> tuple[tuple[int, Node], tuple[int, Node]] | None:
    """The norms of heads in front of both rotations; None unless both are there and alike."""
    norm_q = rewriting.source(q.tensors["x"], "rms_norm", "query_norm")
    norm_k = rewriting.source(k.tensors["x"], "rms_norm")
    if norm_q is None or norm_k is None or norm_q[1].settings["eps"] != norm_k[1].settings["eps"]:
        return None
    for node, (_, norm) in ((q, norm_q), (k, norm_k)):
        head_dim = rewriting.graph.tensors[node.tensors["x"]].shape[1] // int(node.settings["n_head"])
        if norm.settings.get("row", head_dim) != head_dim:
            return None
    return norm_q, norm_k


def _norm_of_rows(rewriting: _Rewriting, place: int, node: Node) -> None:
    """The choice of rows, then their norm."""
    found = rewriting.source(node.tensors["x"], "select_rows")
    (n,) = rewriting.graph.tensors[node.tensors["x"]].shape[1:]
    if found is not None and node.settings["row"] == n:
        at, choice = found
        joined = _node(
            "rms_norm_rows", choice.tensors, node.output, weights=node.weights, settings=node.settings
        )
        rewriting.replace((at, place), place, joined)


def _norms_concat(rewriting: _Rewriting, place: int, node: Node) -> None:
    """Two norms whose results then lie side by side."""
    found = [rewriting.source(node.tensors[role], "rms_norm") for role in ("a", "b")]
    norms = [pair for pair in found if pair is not None]
    if len(norms) < 2 or norms[0][1].settings["eps"] != norms[1][1].settings["eps"]:
        return
    tensors, weights = {}, {}
    for role, (_, norm) in zip(("a", "b"), norms, strict=True):
        tensors[role], weights[role] = norm.tensors["x"], norm.weights["weight"]
        if norm.settings["row"] != rewriting.graph.tensors[tensors[role]].shape[1]:
            return
    settings = {"eps": norms[0][1].settings["eps"]}
    joined = _node("rms_norm_concat", tensors, node.output, weights=weights, settings=settings)
    rewriting.replace((norms[0][0], norms[1][0], place), place, joined)


def _conv_gates(rewriting: _Rewriting, place: int, node: Node) -> None:
    """The gates of a delta net, beside the convolution before it. Neither reads the other."""
    conv = rewriting.written_by(node.tensors["qkv"], "short_conv")
    gates = rewriting.written_by(node.tensors["gates"], "delta_gates")
    if conv is None or gates is None or gates[1].output is None:
        return
    joined = _node(
        "short_conv_gates", {**conv[1].tensors, **gates[1].tensors}, conv[1].output,
        weights={**conv[1].weights, **gates[1].weights}, layer=conv[1].layer, others={"gates": gates[1].output},
    )  # fmt: skip
    last = max(conv[0], gates[0])
    assert last < place, "a node reads what is not written yet"
    rewriting.replace((conv[0], gates[0]), last, joined)


def _product_add(rewriting: _Rewriting, place: int, node: Node) -> None:
    """A product, or the weighted sum of experts, then the residual addition."""
    found = rewriting.source(node.tensors["b"], "mul_mat", "combine_experts")
    if found is not None:
        at, product = found
        tensors = {**product.tensors, "r": node.tensors["a"]}
        joined = _node(f"{product.op}_add", tensors, node.output, weights=product.weights)
        rewriting.replace((at, place), place, joined)


def _products_swiglu(rewriting: _Rewriting, place: int, node: Node) -> None:
    """Gate and up products, then SwiGLU."""
    gate = rewriting.source(node.tensors["gate"], *_SWIGLU)
    up = rewriting.source(node.tensors["up"], *_SWIGLU)
    if gate is not None and up is not None and (gate[1].op, gate[1].tensors) == (up[1].op, up[1].tensors):
        weights = {"gate": gate[1].weights["weight"], "up": up[1].weights["weight"]}
        joined = _node(_SWIGLU[gate[1].op], gate[1].tensors, node.output, weights=weights)
        rewriting.replace((gate[0], up[0], place), place, joined)


def _products(rewriting: _Rewriting, place: int, node: Node) -> None:
    """Products of one x. None of them reads another, so all can stand where the first does."""
    x = node.tensors["x"]
    places = [at for at in rewriting.readers[x] if _op(rewriting, at) == "mul_mat"]
    group = sorted(places)[:MAX_PRODUCTS]
    if place != group[0] or len(group) < 2:
        return
    nodes = [found for found in (rewriting.nodes[at] for at in group) if found is not None]
    weights = {f"{i}": product.weights["weight"] for i, product in enumerate(nodes)}
    first, *others = [name for product in nodes for name in product.results]
    named = {f"y_{i}": name for i, name in enumerate(others, 1)}
    rewriting.replace(group, place, _node("mul_mats", {"x": x}, first, weights=weights, others=named))


def _products_of_norm(rewriting: _Rewriting, place: int, node: Node) -> None:
    """The norm of one row, then all that reads it: products in one node."""
    found = rewriting.source(node.tensors["x"], "rms_norm")
    n_rows, n = rewriting.graph.tensors[node.tensors["x"]].shape
    if found is None or n_rows > 1 or found[1].settings["row"] != n:
        return
    at, norm = found
    joined = _node(
        node.op, {**node.tensors, "x": norm.tensors["x"]}, node.output,
        weights={**node.weights, "norm": norm.weights["weight"]}, settings={"eps": norm.settings["eps"]},
        others=node.others,
    )  # fmt: skip
    rewriting.replace((at, place), place, joined)


def _op(rewriting: _Rewriting, place: int) -> str | None:
    node = rewriting.nodes[place]
    return None if node is None else node.op


#: kind of product -> gate and up products of this kind, then SwiGLU
_SWIGLU = {"mul_mat": "mul_mat_swiglu", "mul_mat_experts": "experts_swiglu"}
#: operation that a chain ends with (of products of one x: begins with), what joins it, and whether it always does, in
#: the order to try them
_PATTERNS: tuple[tuple[str, Callable[[_Rewriting, int, Node], None], bool], ...] = (
    ("rms_norm", _norm_of_rows, True),
    ("concat_rows", _norms_concat, True),
    ("gated_delta", _conv_gates, True),
    ("attention_merge", _attention_whole, True),
    ("output_gate", _attention_gated, True),
    ("store_kv", _rope_store, True),
    ("swiglu", _products_swiglu, False),
    ("add", _product_add, True),
    ("mul_mat", _products, False),
    ("mul_mats", _products_of_norm, False),
    ("mul_mat_swiglu", _products_of_norm, False),
)
