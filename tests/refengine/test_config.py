from __future__ import annotations

import dataclasses
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from malformed_gguf import CASES, F32, GGUF, STR, U32, Tensor, tiny_llama

from refengine.config import ARCHITECTURES, ModelConfig, check_tensors, expected_tensors
from refengine.errors import ModelFileError, UnsupportedModelError
from refengine.gguf_file import GGUFFile

DATA = Path(__file__).parents[1] / "data"
CONFIG_CASES = [name for name, case in CASES.items() if case.needs_config]
QUANTIZED = sorted(path.stem for path in DATA.glob("llama-*.gguf"))


@pytest.fixture
def opened(tmp_path):
    files = []

    def opened(model: GGUF | bytes) -> GGUFFile:
        path = tmp_path / "model.gguf"
        path.write_bytes(model if isinstance(model, bytes) else model.build())
        files.append(GGUFFile.open(path))
        return files[-1]

    yield opened
    for file in files:
        file.close()


def config_of(file: GGUFFile) -> ModelConfig:
    config = ModelConfig.from_gguf(file)
    check_tensors(file, config)
    return config


def test_llama_vector():
    with GGUFFile.open(DATA / "llama.gguf") as file:
        config = config_of(file)
    assert config == ModelConfig(
        architecture="llama",
        name="synthetic-llama-tiny",
        n_layer=4,
        n_embd=64,
        n_ff=96,
        n_head=4,
        n_head_kv=2,
        head_dim=16,
        n_rot=16,
        rope_base=10000.0,
        rope_pairing="norm",
        rms_eps=float(np.float32(1e-6)),
        n_ctx_train=32768,
        n_vocab=320,
        attention_scale=0.25,
        qk_norm=False,
    )
    assert (config.n_embd_q, config.n_embd_kv) == (64, 32)


def test_qwen3_vector():
    with GGUFFile.open(DATA / "qwen3.gguf") as file:
        config = config_of(file)
    assert (config.rope_pairing, config.qk_norm, config.tied_embeddings) == ("neox", True, False)
    assert expected_tensors(config)["blk.3.attn_k_norm.weight"] == (16,)


@pytest.mark.parametrize("stem", QUANTIZED)
def test_quantized_vectors(stem):
    with GGUFFile.open(DATA / f"{stem}.gguf") as file:
        config = config_of(file)
        assert {name: info.shape for name, info in file.tensors.items()} == expected_tensors(config)
    assert config.tied_embeddings


@pytest.mark.parametrize("arch", [name for name, entry in ARCHITECTURES.items() if not entry.hybrid])
def test_defaults_of_absent_keys(opened, arch):
    model = tiny_llama(arch, n_layer=2)
    del model.kv[f"{arch}.attention.head_count_kv"]
    del model.kv["general.name"]
    model.tensors = [t for t in model.tensors if t.name.split(".")[2:3] not in (["attn_k"], ["attn_v"])]
    model.tensors += [Tensor(f"blk.{i}.attn_{kv}.weight", [8, 8]) for i in range(2) for kv in "kv"]
    config = config_of(opened(model))
    assert (config.n_head_kv, config.head_dim, config.n_rot, config.n_vocab) == (2, 4, 4, 12)
    assert (config.rope_base, config.rope_scaling, config.rope_freq_scale) == (10000.0, "none", 1.0)
    assert config.attention_scale == 1 / math.sqrt(4)
    assert config.name == ""


def test_head_dim_may_differ_from_the_embedding_share(opened):
    model = tiny_llama().add("llama.attention.key_length", U32, 6).add("llama.attention.value_length", U32, 6)
    for tensor in model.tensors:
        ne = {"attn_q": [8, 12], "attn_k": [8, 6], "attn_v": [8, 6], "attn_output": [12, 8]}
        tensor.ne = ne.get(tensor.name.removeprefix("blk.0.").removesuffix(".weight"), tensor.ne)
    config = config_of(opened(model))
    assert (config.head_dim, config.n_rot, config.n_embd_q, config.n_embd) == (6, 6, 12, 8)


def test_one_value_per_layer_may_be_an_array(opened):
    model = tiny_llama(n_layer=3)
    for key, value in {
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "feed_forward_length": 16,
    }.items():
        model.add_array(f"llama.{key}", U32, [value] * 3)
    assert config_of(opened(model)).n_head == 2


def test_values_that_differ_between_layers_are_not_supported(opened):
    model = tiny_llama(n_layer=2).add_array("llama.attention.head_count_kv", U32, [1, 2])
    with pytest.raises(UnsupportedModelError, match=r"head_count_kv.*differs between layers, 1 to 2"):
        ModelConfig.from_gguf(opened(model))


def test_vocabulary_without_tokens(opened):
    model = tiny_llama().add("llama.vocab_size", U32, 12)
    del model.kv["tokenizer.ggml.tokens"]
    assert config_of(opened(model)).n_vocab == 12


@pytest.mark.parametrize(
    ("kind", "key", "factor", "expected"),
    [
        ("linear", "scaling.factor", 4.0, ("linear", 0.25)),
        (None, "scaling.factor", 2.0, ("linear", 0.5)),
        (None, "scale_linear", 2.0, ("linear", 0.5)),
        ("linear", "scaling.factor", 0.0, ("none", 1.0)),
        ("linear", "scaling.factor", 1.0, ("none", 1.0)),
        ("none", "scaling.factor", 4.0, ("none", 1.0)),
    ],
)
def test_rope_scaling(opened, kind, key, factor, expected):
    model = tiny_llama().add(f"llama.rope.{key}", F32, factor)
    if kind:
        model.add("llama.rope.scaling.type", STR, kind)
    config = config_of(opened(model))
    assert (config.rope_scaling, config.rope_freq_scale) == expected


def test_optional_tensors_are_expected_when_they_are_there(opened):
    model = tiny_llama()
    model.tensors += [Tensor("output.weight", [8, 12]), Tensor("rope_freqs.weight", [2])]
    config = config_of(opened(model))
    assert config.rope_freqs
    assert not config.tied_embeddings
    assert expected_tensors(config)["rope_freqs.weight"] == (2,)


def test_rope_freqs_are_not_ignored_where_the_architecture_has_none(opened):
    model = tiny_llama("qwen3")
    model.tensors.append(Tensor("rope_freqs.weight", [2]))
    with pytest.raises(UnsupportedModelError, match=r"'rope_freqs\.weight'"):
        config_of(opened(model))


def test_qwen3_needs_its_norms(opened):
    model = tiny_llama("qwen3")
    model.tensors = [tensor for tensor in model.tensors if "attn_q_norm" not in tensor.name]
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_q_norm\.weight.*missing.*\[4\]"):
        config_of(opened(model))


def test_shapes_are_reported_in_c_order(opened):
    with pytest.raises(ModelFileError, match=r"has shape \[13, 8\]; want \[12, 8\]"):
        config_of(opened(CASES["shape_rows"]()))


def test_leading_dimensions_of_1_carry_nothing(opened):
    model = tiny_llama()
    norm = next(tensor for tensor in model.tensors if tensor.name == "output_norm.weight")
    norm.ne = [8, 1, 1]
    config_of(opened(model))


def test_unknown_architecture_names_the_known_ones(opened):
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*want one of llama, qwen3"):
        ModelConfig.from_gguf(opened(CASES["arch_unknown"]()))


def test_override_reaches_the_configuration(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama().build())
    with GGUFFile.open(path, override_kv={"llama.context_length": 16, "llama.rope.freq_base": 5.0}) as file:
        config = config_of(file)
    assert (config.n_ctx_train, config.rope_base) == (16, 5.0)


@pytest.mark.parametrize("name", CONFIG_CASES)
def test_malformed_model_is_refused(opened, name):
    case = CASES[name]
    content = case()
    file = opened(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError if case.supported else UnsupportedModelError) as refused:
            config_of(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(refused.value)
    assert message.isprintable()
    assert case.culprit in message.rpartition("model.gguf: ")[2]
    assert peak <= 2 * len(content) + 65536


@pytest.mark.parametrize(
    "change",
    [
        {"n_layer": 0},
        {"n_head": 3},
        {"n_head_kv": 0},
        {"n_rot": 3},
        {"n_rot": 18},
        {"rms_eps": 0.0},
        {"rope_base": math.inf},
        {"rope_freq_scale": math.nan},
    ],
    ids=str,
)
def test_configuration_holds_its_invariants(change):
    with GGUFFile.open(DATA / "llama.gguf") as file:
        config = ModelConfig.from_gguf(file)
    with pytest.raises(ValueError, match="want"):
        dataclasses.replace(config, **change)
