"""Faults that were planted are found at the tensor and the layer that they are in."""

from __future__ import annotations

import shutil

import pytest
from engines import DATA
from golden_runs import made

from refengine.architectures import common
from refengine.gguf_file import GGUFFile
from refengine.golden.compare import compare
from refengine.graph import Graph


def flipped(name, tensor, folder, byte=1, bit=6):
    """A copy of a model with one bit of a weight turned."""
    path = folder / f"{name}.gguf"
    shutil.copy(DATA / f"{name}.gguf", path)
    with GGUFFile.open(path) as gguf:
        info = gguf.tensor(tensor)
    with path.open("r+b") as file:
        file.seek(info.offset + info.nbytes // 2 // 4 * 4 + byte)
        old = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([old ^ 1 << bit]))
    return path


@pytest.mark.parametrize(
    ("name", "weight", "tensor", "usual"),
    [
        ("llama", "blk.2.ffn_up.weight", "ffn_up-2", "l_out-2"),
        ("llama", "blk.1.attn_k.weight", "Kcur-1", "attn_out-1"),
        ("llama-Q4_K_M", "blk.0.ffn_down.weight", "ffn_out-0", "l_out-0"),
        ("qwen35", "blk.1.ssm_out.weight", "linear_attn_out-1", "linear_attn_out-1"),
        ("qwen35", "blk.4.nextn.eh_proj.weight", "mtp_eh_proj-4", "mtp_eh_proj-4"),
        ("qwen35moe", "blk.3.attn_q.weight", "Qcur_full-3", "attn_output-3"),
    ],
)
def test_a_single_flipped_weight_bit(name, weight, tensor, usual, tmp_path):
    path = flipped(name, weight, tmp_path)
    layer = int(tensor.rpartition("-")[2])
    for tensors, wanted_first in ((("*",), tensor), (None, usual)):
        wanted = made(name, n_tokens=12, n_predict=2, tensors=tensors)
        found = made(name, n_tokens=12, n_predict=2, tensors=tensors, path=path)
        result = compare(found, wanted, exact=True)
        difference = result.differences[0]
        # The only position that the first row attends to has weight 1, whatever its score.
        row = int(wanted_first.startswith("attn_out"))
        assert (difference.tensor, difference.layer, difference.row) == (wanted_first, layer, row)
        assert difference.worst.seen != difference.worst.wanted
        names = [suspect.partition(" ")[0] for suspect in result.suspects]
        assert tensor in names
        assert names[-1] == wanted_first
        assert len(names) == 1 or tensors is None


def test_a_swapped_concat_order_of_the_mtp_block(monkeypatch):
    wanted = made("qwen35", n_tokens=12)
    add = Graph.add

    def swapped(self, op, name, shape, tensors, **rest):
        if op == "concat_rows":
            tensors = {"a": tensors["b"], "b": tensors["a"]}
        return add(self, op, name, shape, tensors, **rest)

    monkeypatch.setattr(Graph, "add", swapped)
    result = compare(made("qwen35", n_tokens=12), wanted, exact=True)
    difference = result.differences[0]
    assert (difference.tensor, difference.layer, difference.row) == ("mtp_concat-4", 4, 0)
    assert result.agrees_before == "mtp_hnorm-4"
    assert result.others == ()  # drafts that are worse change no token
    assert all(each.tensor.startswith("mtp_") for each in result.differences)


@pytest.mark.parametrize(
    ("name", "norm", "usual"),
    [("llama", "ffn_norm-1", "l_out-1"), ("qwen35", "attn_post_norm-2", "l_out-2"),
     ("qwen3", "Kcur_normed-0", "attn_out-0")],
)  # fmt: skip
def test_a_missing_norm(name, norm, usual, monkeypatch):
    everything = made(name, n_tokens=12, n_predict=2, tensors=("*",))
    usually = made(name, n_tokens=12, n_predict=2)
    apply = common.norm

    def missing(graph, result, x, *rest):
        return x if result == norm else apply(graph, result, x, *rest)

    monkeypatch.setattr(common, "norm", missing)
    result = compare(made(name, n_tokens=12, n_predict=2, tensors=("*",)), everything, exact=True)
    assert str(result.differences[0]) == f"{norm} is missing (layer {norm[-1]})"
    result = compare(made(name, n_tokens=12, n_predict=2), usually, exact=True)
    assert (result.differences[0].tensor, result.differences[0].layer) == (usual, int(norm[-1]))
    assert any(suspect.startswith(f"{norm} ") for suspect in result.suspects)
