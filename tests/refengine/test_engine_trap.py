"""Engines at level trap: every access of every kernel is checked, none is found, and no bit is another."""

import numpy as np
import pytest
from engines import DATA, PAIRS, same_bits

import refengine

#: one file of each kind of kernel that its architecture and its formats choose; the others run at level trap as well
SMALLEST = "llama"
OPTIONS = {"n_ctx": 128, "device": "host", "threads": 1}


def outputs(name: str, check: str, **options: object) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Logits of a text and of what follows it, and the tokens of that."""
    with np.load(DATA / f"{name}.npz") as recorded:
        tokens = recorded["tokens"].tolist()
    with refengine.load(DATA / f"{name}.gguf", check=check, **(OPTIONS | options)) as engine:
        logits = engine.logits(tokens)
        made = engine.generate(tokens[:20], n_predict=24, temperature=0, return_logits=True)
        assert engine.check_integrity() == []
        assert engine.findings == []
    return logits, made.logits, made.tokens


def compare(name: str, **options: object) -> None:
    checked, plain = (outputs(name, check, **options) for check in ("trap", "off"))
    assert same_bits(checked[0], plain[0])
    assert same_bits(checked[1], plain[1])
    assert checked[2] == plain[2]


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_nothing_is_found_and_no_bit_is_another(cuda_graphs: bool):
    compare(SMALLEST, cache_type_k="f32", cache_type_v="f32", cuda_graphs=cuda_graphs)


def test_shadows_double_the_memory_and_are_in_the_ledger():
    options = {"cache_type_k": "f32", "cache_type_v": "f32"}
    rows = {}
    for check in ("audit", "trap"):
        with refengine.load(DATA / f"{SMALLEST}.gguf", check=check, **OPTIONS, **options) as engine:
            rows[check] = {(str(row.owner), row.name): row.nbytes for row in engine.allocator.table()}
            assert engine.allocator.check_integrity() == []
    shadows = {name for _, name in rows["trap"].keys() - rows["audit"].keys()}
    assert shadows == {"shadow.weights", "shadow.kv", "shadow.compute", "shadow.rotary"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAIRS if name != SMALLEST])
def test_nothing_is_found_in_any_file(name: str):
    compare(name)


@pytest.mark.slow
@pytest.mark.parametrize("cache_type", ["f16", "bf16", "q8_0"])
def test_nothing_is_found_with_any_cache(cache_type: str):
    compare("llama-Q4_K_M", cache_type_k=cache_type, cache_type_v=cache_type)


@pytest.mark.slow
def test_nothing_is_found_while_drafts_are_verified():
    compare("qwen35", spec_type="draft-mtp")
