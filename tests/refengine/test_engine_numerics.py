"""``check_numerics`` on whole engines: what is planted is found in its tensor, and nothing else in any model."""

from __future__ import annotations

import numpy as np
import pytest
from engine_runs import DRAFTS, load, results, tokens_of, wanted
from engines import DATA, PAIRS, TARGET, same_bits
from fake_cuda import fake_device
from gguf import GGUFReader

import refengine
from refengine.errors import ComputeError
from refengine.kernels import NORM_WARPS
from refengine.kernels.norm import rms_norm

OPTIONS = {"n_ctx": 128, "cache_type_k": "f32", "cache_type_v": "f32"}
DEVICES = ["host", "cuda"]


def planted(tmp_path, name, tensor, change):
    """A copy of a model of which ``change`` changed the float32 numbers of one tensor."""
    source = DATA / f"{name}.gguf"
    file = tmp_path / source.name
    data = bytearray(source.read_bytes())
    (info,) = [each for each in GGUFReader(source).tensors if each.name == tensor]
    assert info.tensor_type.name == "F32"
    numbers = np.frombuffer(data, np.float32, info.n_elements, info.data_offset)
    change(numbers.reshape(info.shape.tolist()[::-1]))
    file.write_bytes(data)
    return file


def engine_of(file, kind="host", **options):
    device = fake_device() if kind == "cuda" else "host"
    threads = 1 if kind == "host" else None
    return refengine.load(file, device=device, threads=threads, check_numerics=True, **(OPTIONS | options))


def only(engine):
    (finding,) = engine.findings
    assert finding.code == "NUM001"
    return finding


def set_nan(place):
    def change(numbers):
        numbers[place] = np.nan

    return change


class TestPlanted:
    @pytest.mark.parametrize("check", ["off", "guard"])
    @pytest.mark.parametrize("cuda_graphs", [True, False])
    @pytest.mark.parametrize("kind", DEVICES)
    def test_a_weight_that_is_nan(self, tmp_path, kind, cuda_graphs, check):
        file = planted(tmp_path, "llama", "blk.1.ffn_norm.weight", set_nan(5))
        with engine_of(file, kind, check=check, cuda_graphs=cuda_graphs) as engine:
            logits = engine.logits(tokens_of("llama"))
            assert np.isnan(logits).any()
            finding = only(engine)
        assert "the kernel may have passed it on: " in finding.notes[0]
        assert "blk.1.ffn_norm.weight (" in finding.notes[0]
        assert "held 1, the first at element 5" in finding.notes[0]
        assert "layer 1 is NaN" in finding.message
        if kind == "host":
            assert finding.message.startswith("ffn_norm-1, row 0, column 5, layer 1 is NaN: kernel rms_norm")
            assert finding.source.file.endswith("norm.py")

    def test_the_scale_of_a_quantised_row(self, tmp_path):
        source = DATA / "llama-Q8_0.gguf"
        data = bytearray(source.read_bytes())
        (info,) = [each for each in GGUFReader(source).tensors if each.name == "blk.0.ffn_down.weight"]
        blocks_of_a_row = int(info.shape[0]) // 32
        np.frombuffer(data, np.uint16, 1, info.data_offset + 3 * blocks_of_a_row * 34)[...] = 0x7E00
        file = tmp_path / source.name
        file.write_bytes(data)
        with engine_of(file) as engine:
            engine.logits(tokens_of("llama-Q8_0"))
            finding = only(engine)
        assert "row 0, column 3, layer 0 is NaN" in finding.message
        assert "blk.0.ffn_down.weight.halves (" in finding.notes[0]

    def test_keys_that_overflow_half_precision(self, tmp_path):
        def change(numbers):
            numbers *= 1e6

        file = planted(tmp_path, "llama", "blk.0.attn_k.weight", change)
        with engine_of(file, cache_type_k="f16", cache_type_v="f16") as engine:
            engine.logits(tokens_of("llama"))
            finding = only(engine)
        assert finding.message.startswith("kv.k.0, element [0, ")
        assert "layer 0 is infinite" in finding.message
        assert finding.argument == "k_cache"
        assert "it made this one itself" in finding.notes[0]
        # The same keys fit float32.
        with engine_of(file) as engine:
            engine.logits(tokens_of("llama"))
            assert engine.findings == []

    def test_a_row_of_zeros_and_an_epsilon_of_zero(self):
        from engines import Bench  # noqa: PLC0415

        bench = Bench()
        bench.device.watch(bench.allocator, check_numerics=True)
        arena = bench.arena()
        x = np.ones((4, 64), np.float32)
        x[2] = 0
        views = {"x": bench.put(arena, x, "l_out-6"), "weight": bench.put(arena, x[0], "w")}
        views["y"] = bench.put(arena, x, "attn_norm-7")
        bench.stream.launch(rms_norm(NORM_WARPS[False]), 4, {**views, "eps": 0.0})
        bench.stream.synchronize()
        (finding,) = bench.findings
        assert finding.message.startswith("attn_norm-7, row 2, column 0, layer 7 is NaN: kernel rms_norm")
        assert "64 elements" in finding.message
        assert "it made this one itself" in finding.notes[0]
        assert finding.actor == TARGET.name

    @pytest.mark.parametrize("kind", DEVICES)
    def test_one_row_of_a_batch_is_lost_and_the_others_are_not(self, tmp_path, kind):
        tokens = tokens_of("llama")
        options = {"n_predict": 8, "temperature": 0, "return_logits": True, "ignore_eos": True}
        with load("llama", cache_type_k="f32", cache_type_v="f32") as engine:
            alone = engine.generate(tokens[:12], **options)
        bad = next(token for token in range(1, 200) if token not in (*tokens, *alone.tokens))
        file = planted(tmp_path, "llama", "token_embd.weight", set_nan((bad, 9)))
        with engine_of(file, kind, n_slots=2) as engine:
            good = engine.submit(tokens[:12], background=False, **options)
            poisoned = engine.submit([*tokens[:5], bad, *tokens[5:8]], background=False, **options)
            result = good.result()
            with pytest.raises(ComputeError, match="not finite"):
                poisoned.result()
            finding = only(engine)
        assert result.tokens == alone.tokens
        assert same_bits(result.logits, alone.logits)
        assert "column 9" in finding.message
        assert "is NaN" in finding.message
        assert "token_embd.weight.words (" in finding.notes[0]
        assert f"held 1, the first at row {bad}, column 9" in finding.notes[0]


def compare(name, device="host", **options):
    """Nothing is found, and no bit is another than without looking."""
    plain = {key: value for key, value in options.items() if key != "check"}
    with load(name, device, check_numerics=True, **options) as engine:
        found = results(engine, tokens_of(name))
        assert engine.findings == []
    expected = wanted(name, tuple(sorted(plain.items())))
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


class TestNothingElse:
    @pytest.mark.parametrize("name", PAIRS)
    def test_in_any_model(self, name):
        compare(name, check="guard")

    @pytest.mark.parametrize("name", ["llama", "qwen35"])
    def test_on_a_gpu(self, name):
        compare(name, fake_device(), check="guard", cuda_graphs=name == "qwen35")

    @pytest.mark.parametrize("check", ["off", "audit"])
    def test_with_drafts_and_rollbacks(self, check):
        compare("qwen35", check=check, **DRAFTS)

    def test_with_drafts_on_a_gpu(self):
        compare("qwen35", fake_device(), check="audit", **DRAFTS)

    @pytest.mark.parametrize("cache_type", ["f32", "bf16", "q8_0"])
    def test_with_any_cache(self, cache_type):
        # Only heads of whole blocks can be stored as Q8_0.
        name = "llama-Q4_K_M" if cache_type == "q8_0" else "llama"
        compare(name, cache_type_k=cache_type, cache_type_v=cache_type)

    @pytest.mark.parametrize("spec", [{}, {"spec_type": "draft-mtp"}], ids=["plain", "drafts"])
    def test_with_preemption(self, spec):
        tokens = tokens_of("qwen35")
        with refengine.load(
            DATA / "qwen35.gguf", device="host", threads=1, n_ctx=96, n_slots=3, check="guard",
            check_numerics=True, **spec,
        ) as engine:  # fmt: skip
            requests = [
                engine.submit(tokens[:30], n_predict=40, ignore_eos=True, seed=seed, background=False)
                for seed in range(3)
            ]
            texts = [request.result().tokens for request in requests]
            assert all(len(made) == 40 for made in texts)
            assert engine.scheduler.statistics.preemptions > 0
            assert engine.findings == []

    def test_when_memory_holds_nan_before(self, monkeypatch):
        """Fresh memory that is full of NaN, as if another program had left it there."""
        from instrumentation.devices.host_memory import HostMemory  # noqa: PLC0415

        usual = HostMemory.allocate

        def allocate(self, nbytes):
            address = usual(self, nbytes)
            self.fill_bytes(address, nbytes, 0xFF)
            return address

        monkeypatch.setattr(HostMemory, "allocate", allocate)
        compare("qwen35", check="off", **DRAFTS)

    def test_at_level_trap(self):
        compare("llama", check="trap", cache_type_k="f32", cache_type_v="f32")
