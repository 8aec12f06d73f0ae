"""The MTP block of qwen35 and qwen35moe: from a token and the hidden row before it, the token after it.

One attention block behind a projection of both. Its first hidden rows are the trunk's, of the buffer ``hidden`` in
which that hands them over; while it drafts it goes on from its own, of the buffer ``chain``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from refengine.architectures import common, qwen35

if TYPE_CHECKING:
    from refengine.config import ModelConfig
    from refengine.graph import BatchShape, ContextShape, Graph


def build(config: ModelConfig, context: ContextShape, shape: BatchShape) -> Graph:
    """Graph of one batch: llama's inputs, hidden_rows (T,), chain_rows (T,) -> result_norm, result_output.

    Persistent buffers: ``hidden`` [n_hidden, n_embd] is read, ``chain`` [n_sequences, n_embd] read, then written.
    hidden_rows: which hidden row goes with each token, as ``refengine.kernels.hidden.gather_hidden`` takes them.
    chain_rows: the row of ``chain`` that each result goes to, negative: to none. The KV cache is that of layer
    ``config.n_layer``.
    """
    hybrid = config.hybrid
    assert hybrid is not None, config
    assert hybrid.n_nextn == 1, config
    layer, n_embd, eps = config.n_layer, config.n_embd, config.rms_eps
    il, block = f"-{layer}", f"blk.{layer}.nextn"

    def weight(name: str, of_trunk: str) -> str:
        return f"{block}.{name}.weight" if name in hybrid.nextn_tensors else of_trunk

    graph = common.inputs(context, shape)
    for rows in ("hidden_rows", "chain_rows"):
        graph.input(rows, (shape.n_tokens,), "tokens")
    graph.prefix = "mtp_"
    e = common.embed(graph, config, f"tok_embd{il}", weight("embed_tokens", "token_embd.weight"))
    h = graph.add(
        "gather_hidden", f"h_input{il}", (shape.n_tokens, n_embd), {"rows": "hidden_rows"},
        buffers={"hidden": "hidden", "chain": "chain"},
    )  # fmt: skip
    e = common.norm(graph, f"enorm{il}", e, f"{block}.enorm.weight", eps, n_embd)
    h = common.norm(graph, f"hnorm{il}", h, f"{block}.hnorm.weight", eps, n_embd)
    both = graph.add("concat_rows", f"concat{il}", (shape.n_tokens, 2 * n_embd), {"a": e, "b": h})
    x = common.mul_mat(graph, f"eh_proj{il}", both, f"{block}.eh_proj.weight", n_embd)
    a = qwen35.attention_norm(graph, config, layer, x)
    a = qwen35.gated_attention(graph, config, layer, a, "attn_out")
    x = common.add(graph, f"attn_residual{il}", x, a)
    x = common.add(graph, f"post_ffn{il}", x, qwen35.feed_forward(graph, config, layer, x))
    graph.prefix = ""
    weights = (
        weight("shared_head_norm", "output_norm.weight"),
        weight("shared_head_head", common.vocabulary_head(config)),
    )
    return common.end_handing_over(graph, config, x, weights=weights, buffer="chain", rows="chain_rows")
