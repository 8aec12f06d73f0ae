"""``refengine inspect``, and the plan behind it: what it says is what an engine takes."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from malformed_gguf import ARR, F32, F64, GGUF, I8, STR, U32, U64, Tensor, array, tiny_llama

import refengine
from instrumentation.levels import Level
from refengine.errors import ModelFileError
from refengine.gguf_file import GGUFFile
from refengine.inspection import MAX_SHOWN, check_tensor_data, memory_plan, summarise
from refengine.options import EngineOptions

DATA = Path(__file__).resolve().parent.parent / "data"
MODELS = ("llama", "qwen3", "llama-Q4_K_M", "llama-Q8_0", "llama-IQ4_NL")
HYBRIDS = ("qwen35", "qwen35-tied", "qwen35-Q4_K_M", "qwen35moe")


def plan_of(path, **options):
    with GGUFFile.open(path) as gguf:
        return memory_plan(gguf, EngineOptions(**options))


# --- the plan


@pytest.mark.parametrize("level", ["off", "guard"])
@pytest.mark.parametrize(
    ("model", "options"),
    [(name, {"n_ctx": 300}) for name in (*MODELS, *HYBRIDS)]
    + [
        ("llama", {"n_ctx": 64, "cache_type_k": "f32", "cache_type_v": "bf16"}),
        ("llama-Q4_K_M", {"n_ctx": 64, "cache_type_k": "q8_0", "cache_type_v": "f16"}),
        ("qwen35-Q4_K_M", {"n_ctx": 64, "cache_type_k": "f16", "cache_type_v": "q8_0"}),
        ("llama", {"n_ctx": 33, "n_batch": 7, "n_ubatch": 5}),
        ("llama", {"n_ctx": 1, "n_batch": 1, "n_ubatch": 1}),
        ("qwen3", {"n_ctx": 500, "n_ubatch": 40}),
        ("qwen35", {"n_ctx": 33, "n_batch": 7, "n_ubatch": 5}),
        ("qwen3", {"n_ctx": 2048, "n_ubatch": 2048, "n_batch": 600, "cuda_graphs": False}),
    ],
)
def test_a_plan_is_what_an_engine_reserves(model, options, level):
    path = DATA / f"{model}.gguf"
    plan = plan_of(path, **options)
    with refengine.load(path, check=level, threads=1, **options) as engine:
        loaded = engine.allocator.snapshot()
        assert plan.total(engine.level) == loaded.reserved == loaded.reserved_peak
        planned = {(arena.owner, arena.name): arena.at(engine.level) for arena in plan.arenas}
        assert planned == {(arena.owner, arena.name): arena.nbytes for arena in engine.allocator.arenas}
        for arena in plan.arenas:
            if arena.name != "compute":  # whose buffers come and go with each batch
                assert loaded.arenas[arena.name].current == arena.payload
        engine.logits([1] * min(options["n_ctx"], 70))
        after = engine.allocator.snapshot()
        assert after.reserved == loaded.reserved, "a run takes nothing that was not planned"
        [compute] = [arena for arena in plan.arenas if arena.name == "compute"]
        assert after.arenas["compute"].peak <= compute.payload


def test_guard_costs_its_redzones_and_off_only_alignment():
    plan = plan_of(DATA / "llama.gguf", n_ctx=256)
    buffers = sum(arena.buffers for arena in plan.arenas)
    assert 0 <= plan.total(Level.OFF) - plan.payload < 256 * buffers
    assert 2 * 256 * buffers <= plan.total(Level.GUARD) - plan.payload <= 3 * 256 * buffers


def test_a_larger_context_costs_cache_and_tables_only():
    small, large = (plan_of(DATA / "qwen3.gguf", n_ctx=n) for n in (1024, 2048))
    for before, after in zip(small.arenas, large.arenas, strict=True):
        if before.name in ("kv", "rotary"):
            assert after.payload == 2 * before.payload
        elif before.name == "weights":
            assert after == before


# --- the tables


def test_tables_show_metadata_tensors_types_and_plan(run):
    result = run("inspect", "-m", DATA / "llama-Q4_K_M.gguf", "-c", "512")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["llama.block_count", "u32", "1"] in rows
    assert ["general.architecture", "str", "'llama'"] in rows
    assert any(row[:2] == ["blk.0.attn_q.weight", "Q4_K"] for row in rows)
    [total] = [row for row in rows if row[:1] == ["total"]]
    plan = plan_of(DATA / "llama-Q4_K_M.gguf", n_ctx=512)
    sizes = [plan.payload, plan.total(Level.OFF), plan.total(Level.GUARD)]
    assert total[2:] == [f"{nbytes:,}" for nbytes in sizes]


def test_json_has_the_same_numbers(run):
    path = DATA / "qwen3.gguf"
    result = run("inspect", "-m", path, "-c", "512", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    shown = json.loads(result.stdout)
    plan = plan_of(path, n_ctx=512)
    assert (shown["plan"]["off"], shown["plan"]["guard"]) == (plan.total(Level.OFF), plan.total(Level.GUARD))
    assert sum(arena["payload"] for arena in shown["plan"]["arenas"]) == plan.payload
    assert {arena["owner"] for arena in shown["plan"]["arenas"]} == {"model", "target"}
    assert shown["plan"]["settings"]["n_ctx"] == 512
    assert shown["metadata"]["general.architecture"] == {"type": "str", "value": "qwen3"}
    tokens = shown["metadata"]["tokenizer.ggml.tokens"]
    assert len(tokens["value"]) == MAX_SHOWN < tokens["length"]
    with GGUFFile.open(path) as gguf:
        assert {t["name"]: t["nbytes"] for t in shown["tensors"]} == {
            name: info.nbytes for name, info in gguf.tensors.items()
        }
        assert sum(row["nbytes"] for row in shown["types"]) == sum(i.nbytes for i in gguf.tensors.values())


@pytest.mark.parametrize("model", HYBRIDS)
def test_the_recurrent_state_is_planned_and_the_mtp_block_is_said_to_be_left_out(run, model):
    plan = plan_of(DATA / f"{model}.gguf", n_ctx=512)
    [states] = [arena for arena in plan.arenas if arena.name == "recurrent"]
    assert (str(states.owner), states.buffers) == ("target", 2 * 3)
    longer = plan_of(DATA / f"{model}.gguf", n_ctx=1024)
    assert states in longer.arenas, "the state does not depend on the context's length"
    [kv] = [arena for arena in plan.arenas if arena.name == "kv"]
    assert kv.buffers == 2, "the only layer that attends"
    with GGUFFile.open(DATA / f"{model}.gguf") as gguf:
        assert set(plan.not_loaded) == {name for name in gguf.tensors if name.startswith("blk.4.")}
    n_left = len(plan.not_loaded)
    shown = run("inspect", "-m", DATA / f"{model}.gguf", "-c", "512").stdout
    assert f"not loaded: {n_left} tensors of the MTP block; --spec-type draft-mtp loads them" in shown
    as_json = json.loads(run("inspect", "-m", DATA / f"{model}.gguf", "-c", "512", "--json").stdout)
    assert as_json["plan"]["not_loaded"] == list(plan.not_loaded)
    assert "not loaded" not in run("inspect", "-m", DATA / "llama.gguf").stdout


def test_bits_per_weight_are_those_of_the_format():
    with GGUFFile.open(DATA / "llama-Q8_0.gguf") as gguf:
        bits = {row.type: row.bits_per_weight for row in summarise(gguf).types}
    assert bits["Q8_0"] == 8.5
    assert bits["F32"] == 32


def test_hostile_text_is_shown_as_text(run, tmp_path):
    gguf = tiny_llama()
    gguf.add("general.name", STR, "\x1b[2J\nx" + "y" * 500)
    gguf.add("a\x07b", U32, 1)
    gguf.add("weird", F32, math.nan)
    gguf.kv["infinite"] = (ARR, array(F64, [math.inf, 1.0]))
    gguf.kv["empty"] = (ARR, array(STR, []))
    gguf.add("big", U64, 2**64 - 1)
    path = tmp_path / "odd\x1b.gguf"
    path.write_bytes(gguf.build())
    table = run("inspect", "-m", path).stdout
    assert all(line.isprintable() for line in table.splitlines())
    assert "y" * 80 not in table
    shown = json.loads(run("inspect", "-m", path, "--json").stdout)["metadata"]
    assert shown["weird"]["value"] == "nan"
    assert shown["infinite"] == {"type": "f64[2]", "value": ["inf", 1.0], "length": 2}
    assert shown["empty"] == {"type": "str[0]", "value": [], "length": 0}
    assert shown["big"]["value"] == 2**64 - 1


def test_a_file_that_cannot_run_is_shown_as_far_as_it_goes(run, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF(tensors=[Tensor("t", [8])]).add("general.architecture", STR, "mamba").build())
    result = run("inspect", "-m", path)
    assert result.exit_code == 2
    assert "general.architecture" in result.stdout
    assert "memory plan" not in result.stdout
    assert "'mamba'" in result.stderr
    json_result = run("inspect", "-m", path, "--json")
    assert (json_result.exit_code, json_result.stderr) == (2, result.stderr)
    shown = json.loads(json_result.stdout)
    assert shown["plan"] is None
    assert shown["metadata"]["general.architecture"]["value"] == "mamba"


def test_options_that_loading_would_refuse_are_refused(run, one_line):
    assert "n_ctx is 99999" in one_line(run("inspect", "-m", DATA / "llama.gguf", "-c", "99999", "--json"), 2)
    assert "n_batch" in one_line(run("inspect", "-m", DATA / "llama.gguf", "-b", "0"), 2)
    assert "no such file" in one_line(run("inspect", "-m", "nope"), 2)


def test_overrides_are_shown_and_planned_with(run):
    args = ("inspect", "-m", DATA / "llama.gguf", "--json", "--override-kv", "llama.context_length=int:128")
    shown = json.loads(run(*args).stdout)
    assert shown["metadata"]["llama.context_length"]["value"] == 128
    assert shown["plan"]["settings"]["n_ctx"] == 128


# --- the values


@pytest.mark.parametrize("model", [*MODELS, "llama-F16", "llama-Q5_0", "llama-Q6_K", "llama-Q4_1"])
def test_sound_weights_are_finite(model):
    with GGUFFile.open(DATA / f"{model}.gguf") as gguf:
        check_tensor_data(gguf)


def poisoned(tmp_path, model, tensor, offset, raw):
    path = tmp_path / "poisoned.gguf"
    shutil.copy(DATA / f"{model}.gguf", path)
    with GGUFFile.open(path) as gguf:
        at = gguf.tensor(tensor).offset + offset
    with path.open("r+b") as file:
        file.seek(at)
        file.write(raw)
    return path


@pytest.mark.parametrize(
    ("model", "tensor", "offset", "raw", "row", "column"),
    [
        ("llama", "blk.2.ffn_down.weight", 4 * (96 * 5 + 7), struct.pack("<f", math.nan), 5, 7),
        ("llama", "blk.2.ffn_down.weight", 4 * (96 * 63 + 95), struct.pack("<f", math.inf), 63, 95),
        ("llama", "output_norm.weight", 4 * 9, struct.pack("<f", -math.inf), 0, 9),
        ("llama-Q8_0", "blk.0.attn_q.weight", 34 * (256 // 32 + 3), b"\x00\x7c", 1, 96),
        ("llama-F16", "blk.0.attn_q.weight", 2 * 256, b"\x01\x7e", 1, 0),
    ],
)
def test_a_weight_that_is_not_finite_is_named(
    run, generate, one_line, tmp_path, model, tensor, offset, raw, row, column
):
    path = poisoned(tmp_path, model, tensor, offset, raw)
    with (
        GGUFFile.open(path) as gguf,
        pytest.raises(ModelFileError, match=rf"'{tensor}': row {row}, column {column} is"),
    ):
        check_tensor_data(gguf)
    assert tensor in one_line(generate("-p", "a", "--check-tensors", model=path), 2)
    result = run("inspect", "-m", path, "--check-tensors")
    assert (result.exit_code, "row" in result.stderr) == (2, True)
    assert run("inspect", "-m", path).exit_code == 0


def test_integers_are_finite_and_chunks_reach_the_end(tmp_path):
    rows = (1 << 20) // 8 + 3  # more than one chunk
    data = np.zeros(rows * 8, "<f4")
    data[-2] = np.nan
    path = tmp_path / "m.gguf"
    tensors = [
        Tensor("whole", [32], kind=I8_TYPE, data=bytes(32)),
        Tensor("long", [8, rows], data=data.tobytes()),
    ]
    path.write_bytes(GGUF(tensors=tensors).build())
    with (
        GGUFFile.open(path) as gguf,
        pytest.raises(ModelFileError, match=f"'long': row {rows - 1}, column 6 is nan"),
    ):
        check_tensor_data(gguf)


I8_TYPE = int(GGMLQuantizationType.I8)
assert I8 != I8_TYPE  # the metadata's type numbers are not the tensors'
