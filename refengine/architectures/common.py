"""Stages that decoder architectures share. Shapes in C order; T is ``n_tokens`` of the batch shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from refengine.errors import UnsupportedModelError
from refengine.graph import BatchShape, ContextShape, Graph
from refengine.kernels.attention import HEAD_DIM_UNIT, MAX_HEAD_DIM
from refengine.kernels.select import n_chunks

if TYPE_CHECKING:
    from refengine.config import ModelConfig


def begin(config: ModelConfig, context: ContextShape, shape: BatchShape) -> tuple[Graph, str]:
    """A graph with the inputs of every decoder, and its token embeddings (T, n_embd)."""
    graph = inputs(context, shape)
    return graph, embed(graph, config, "inp_embd", "token_embd.weight")


def inputs(context: ContextShape, shape: BatchShape) -> Graph:
    """A graph with the inputs of every decoder."""
    graph = Graph(shape)
    for name in ("tokens", "position", "sequence", "cell"):
        graph.input(name, (shape.n_tokens,), "tokens")
    graph.input("pages", (context.n_sequences, context.n_pages), "fixed")
    if shape.n_outputs:
        graph.input("output_rows", (shape.n_outputs,), "outputs")
    return graph


def embed(graph: Graph, config: ModelConfig, name: str, weight: str) -> str:
    """The tokens' rows of an embedding matrix: (T, n_embd)."""
    shape = (graph.shape.n_tokens, config.n_embd)
    return graph.add("get_rows", name, shape, {"rows": "tokens"}, weights={"weight": weight})


def mul_mat(graph: Graph, name: str, x: str, weight: str, n_out: int) -> str:
    """Product of x (n, n_in) and a weight matrix [n_out, n_in] -> (n, n_out)."""
    rows = graph.tensors[x].shape[0]
    return graph.add("mul_mat", name, (rows, n_out), {"x": x}, weights={"weight": weight})


def norm(graph: Graph, name: str, x: str, weight: str, eps: float, row: int) -> str:
    """RMS norm over the last ``row`` elements, which may be a head's part of a token's row; same shape as x."""
    shape = graph.tensors[x].shape
    return graph.add("rms_norm", name, shape, {"x": x}, weights={"weight": weight}, eps=eps, row=row)


def attention(graph: Graph, config: ModelConfig, layer: int, x: str, *, head_norms: bool) -> str:
    """Causal self-attention over the layer's KV cache: (T, n_embd) -> (T, n_embd)."""
    block, il = f"blk.{layer}", f"-{layer}"
    q = mul_mat(graph, f"Qcur{il}", x, f"{block}.attn_q.weight", config.n_embd_q)
    k = mul_mat(graph, f"Kcur{il}", x, f"{block}.attn_k.weight", config.n_embd_kv)
    v = mul_mat(graph, f"Vcur{il}", x, f"{block}.attn_v.weight", config.n_embd_kv)
    if head_norms:
        q = norm(graph, f"Qcur_normed{il}", q, f"{block}.attn_q_norm.weight", config.rms_eps, config.head_dim)
        k = norm(graph, f"Kcur_normed{il}", k, f"{block}.attn_k_norm.weight", config.rms_eps, config.head_dim)
    attended = attend(graph, config, layer, q, k, v)
    return mul_mat(graph, f"attn_out{il}", attended, f"{block}.attn_output.weight", config.n_embd)


def attend(
    graph: Graph, config: ModelConfig, layer: int, q: str, k: str, v: str, *, name: str = "kqv_out"
) -> str:
    """Rotate and store keys, store values, attend: q -> a tensor of its shape, (T, n_head * head_dim)."""
    if config.head_dim % HEAD_DIM_UNIT or config.head_dim > MAX_HEAD_DIM:
        raise UnsupportedModelError(
            f"heads of {config.head_dim} elements are not built; want a multiple of {HEAD_DIM_UNIT}, "
            f"at most {MAX_HEAD_DIM}"
        )
    il = f"-{layer}"
    q = _rope(graph, config, f"Qcur_rope{il}", q, config.n_head)
    k = _rope(graph, config, f"Kcur_rope{il}", k, config.n_head_kv)
    graph.add("store_kv", f"kv{il}", None, {"k": k, "v": v, "cell": "cell"}, layer=layer)
    spans = graph.add(
        "attention", f"kqv_spans{il}",
        (graph.shape.n_tokens, config.n_head, graph.shape.n_spans, config.head_dim + 2),
        {"q": q, "position": "position", "sequence": "sequence", "pages": "pages"},
        layer=layer, scale=config.attention_scale,
    )  # fmt: skip
    return graph.add(
        "attention_merge", f"{name}{il}", graph.tensors[q].shape, {"spans": spans, "position": "position"},
        scale=config.attention_scale,
    )  # fmt: skip


def _rope(graph: Graph, config: ModelConfig, name: str, x: str, n_head: int) -> str:
    tensors = {"x": x, "position": "position"}
    return graph.add(
        "rope", name, graph.tensors[x].shape, tensors, n_head=n_head, pairing=config.rope_pairing
    )


def feed_forward(graph: Graph, config: ModelConfig, layer: int, x: str) -> str:
    """SwiGLU feed-forward: (T, n_embd) -> (T, n_embd)."""
    block, il = f"blk.{layer}", f"-{layer}"
    gate = mul_mat(graph, f"ffn_gate{il}", x, f"{block}.ffn_gate.weight", config.n_ff)
    up = mul_mat(graph, f"ffn_up{il}", x, f"{block}.ffn_up.weight", config.n_ff)
    both = swiglu(graph, f"ffn_swiglu{il}", gate, up)
    return mul_mat(graph, f"ffn_out{il}", both, f"{block}.ffn_down.weight", config.n_embd)


def swiglu(graph: Graph, name: str, gate: str, up: str) -> str:
    """Product gate * sigmoid(gate) * up of two tensors of one shape."""
    return graph.add("swiglu", name, graph.tensors[gate].shape, {"gate": gate, "up": up})


def add(graph: Graph, name: str, a: str, b: str) -> str:
    """Residual sum of two tensors of one shape."""
    return graph.add("add", name, graph.tensors[a].shape, {"a": a, "b": b})


def end(graph: Graph, config: ModelConfig, x: str) -> Graph:
    """Final norm and vocabulary head for the rows that are wanted.

    Outputs: ``result_norm`` (n_outputs, n_embd) and ``result_output`` (n_outputs, n_vocab); with ``n_best`` the latter
    stays in the graph, and ``result_best`` (n_outputs, 2 * n_best + 1) is the output, int32 as ``best_of_rows`` has it.
    """
    n_outputs = graph.shape.n_outputs
    if n_outputs:
        graph.rows = "outputs"
        rows = graph.add(
            "select_rows", "result_rows", (n_outputs, config.n_embd), {"x": x, "rows": "output_rows"}
        )
        rows = graph.add(
            "rms_norm", "result_norm", (n_outputs, config.n_embd), {"x": rows},
            weights={"weight": "output_norm.weight"}, kind="output", eps=config.rms_eps, row=config.n_embd,
        )  # fmt: skip
        _vocabulary(graph, config, rows, vocabulary_head(config))
    return graph


def end_handing_over(
    graph: Graph, config: ModelConfig, x: str, *, weights: tuple[str, str], buffer: str, rows: str
) -> Graph:
    """As ``end``, but every row is normed, into ``h_nextn`` (T, n_embd), and kept in a persistent ``buffer``.

    ``weights``: final norm and vocabulary head. ``rows``: input (T,) that says which row of the buffer each one
    goes to, negative: to none. The outputs are those of ``end``, bit for bit.
    """
    n_outputs = graph.shape.n_outputs
    norm_weight, head = weights
    h = norm(graph, "h_nextn", x, norm_weight, config.rms_eps, config.n_embd)
    if n_outputs:
        graph.rows = "outputs"
        wanted = graph.add(
            "select_rows", "result_norm", (n_outputs, config.n_embd), {"x": h, "rows": "output_rows"},
            kind="output",
        )  # fmt: skip
        _vocabulary(graph, config, wanted, head)
    # Last, so that nobody who waits for the outputs need wait for it.
    graph.add("scatter_rows", f"{buffer}_written", None, {"x": h, "rows": rows}, buffers={"y": buffer})
    return graph


def vocabulary_head(config: ModelConfig) -> str:
    """Name of the matrix that makes the trunk's logits."""
    return "token_embd.weight" if config.tied_embeddings else "output.weight"


def _vocabulary(graph: Graph, config: ModelConfig, x: str, head: str) -> None:
    shape = graph.shape
    logits = graph.add(
        "mul_mat", "result_output", (shape.n_outputs, config.n_vocab), {"x": x}, weights={"weight": head},
        kind="compute" if shape.n_best else "output",
    )  # fmt: skip
    if not shape.n_best:
        return
    lists = (shape.n_outputs, n_chunks(config.n_vocab))
    graph.add(
        "best_of_chunks", "result_chunks", None, {"x": logits},
        others={"keys": ("result_keys", (*lists, shape.n_best), np.int64), "bad": ("result_bad", lists, np.int32)},
    )  # fmt: skip
    graph.add(
        "best_of_rows", "result_rows_best", None, {"x": logits, **graph.nodes[-1].others},
        others={"best": ("result_best", (shape.n_outputs, 2 * shape.n_best + 1), np.int32)}, kind="output",
    )  # fmt: skip
