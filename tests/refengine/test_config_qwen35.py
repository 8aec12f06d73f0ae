"""Configurations of models with gated delta nets: what they are read from, and what is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from malformed_gguf import ARR, BOOL, GGUF, N_EMBD, N_FF, U32, Tensor, array, tiny_llama

from refengine.config import ModelConfig, check_tensors, expected_tensors, loaded_tensors
from refengine.config_qwen35 import ExpertConfig, HybridConfig
from refengine.errors import ModelFileError, UnsupportedModelError
from refengine.gguf_file import GGUFFile

DATA = Path(__file__).parents[1] / "data"
NAMES = ("qwen35", "qwen35-tied", "qwen35-Q4_K_M", "qwen35moe")
#: value heads of 4 elements, key heads, taps
N_VALUE, N_KEY, SIZE, TAPS = 4, 2, 4, 4
CHANNELS = (2 * N_KEY + N_VALUE) * SIZE
HEAD_DIM = 4


def feed_forward(arch: str) -> dict[str, list[int]]:
    if arch == "qwen35":
        return {"ffn_gate": [N_EMBD, N_FF], "ffn_up": [N_EMBD, N_FF], "ffn_down": [N_FF, N_EMBD]}
    return {
        "ffn_gate_inp": [N_EMBD, 3],
        "ffn_gate_exps": [N_EMBD, 6, 3],
        "ffn_up_exps": [N_EMBD, 6, 3],
        "ffn_down_exps": [6, N_EMBD, 3],
        "ffn_gate_inp_shexp": [N_EMBD],
        "ffn_gate_shexp": [N_EMBD, 5],
        "ffn_up_shexp": [N_EMBD, 5],
        "ffn_down_shexp": [5, N_EMBD],
    }


ATTENTION = {
    "attn_q": [N_EMBD, 2 * 2 * HEAD_DIM],
    "attn_k": [N_EMBD, HEAD_DIM],
    "attn_v": [N_EMBD, HEAD_DIM],
    "attn_q_norm": [HEAD_DIM],
    "attn_k_norm": [HEAD_DIM],
    "attn_output": [2 * HEAD_DIM, N_EMBD],
}
DELTA_NET = {
    "attn_qkv": [N_EMBD, CHANNELS],
    "attn_gate": [N_EMBD, N_VALUE * SIZE],
    "ssm_conv1d": [TAPS, CHANNELS],
    "ssm_beta": [N_EMBD, N_VALUE],
    "ssm_alpha": [N_EMBD, N_VALUE],
    "ssm_norm": [SIZE],
    "ssm_out": [N_VALUE * SIZE, N_EMBD],
}


def tiny(arch: str = "qwen35", n_nextn: int = 1) -> GGUF:
    """A sound model: a delta net, a layer that attends, MTP blocks."""
    gguf = tiny_llama(arch)
    gguf.add(f"{arch}.block_count", U32, 2 + n_nextn)
    gguf.add(f"{arch}.nextn_predict_layers", U32, n_nextn)
    gguf.add(f"{arch}.full_attention_interval", U32, 2)
    gguf.add(f"{arch}.rope.dimension_count", U32, 4)
    gguf.add_array(f"{arch}.rope.dimension_sections", U32, [1, 1, 0, 0])
    numbers = {"conv_kernel": TAPS, "inner_size": N_VALUE * SIZE, "state_size": SIZE}
    numbers |= {"time_step_rank": N_VALUE, "group_count": N_KEY}
    for key, value in numbers.items():
        gguf.add(f"{arch}.ssm.{key}", U32, value)
    if arch == "qwen35moe":
        numbers = {"count": 3, "used_count": 2, "feed_forward_length": 6, "shared_feed_forward_length": 5}
        for key, value in numbers.items():
            gguf.add(f"{arch}.expert_{key}", U32, value)
        del gguf.kv[f"{arch}.feed_forward_length"]
    gguf.tensors = [tensor for tensor in gguf.tensors if not tensor.name.startswith("blk.")]
    for layer in range(2 + n_nextn):
        shapes = {"attn_norm": [N_EMBD], "post_attention_norm": [N_EMBD], **feed_forward(arch)}
        shapes |= DELTA_NET if layer == 0 else ATTENTION
        if layer >= 2:
            shapes |= {
                "nextn.eh_proj": [2 * N_EMBD, N_EMBD],
                "nextn.enorm": [N_EMBD],
                "nextn.hnorm": [N_EMBD],
            }
        gguf.tensors += [Tensor(f"blk.{layer}.{name}.weight", ne) for name, ne in shapes.items()]
    gguf.tensors += [Tensor("blk.0.ssm_a", [N_VALUE]), Tensor("blk.0.ssm_dt.bias", [N_VALUE])]
    return gguf


@pytest.fixture
def config_of(tmp_path):
    def config_of(model: GGUF) -> ModelConfig:
        path = tmp_path / "model.gguf"
        path.write_bytes(model.build())
        with GGUFFile.open(path) as gguf:
            config = ModelConfig.from_gguf(gguf)
            check_tensors(gguf, config)
        return config

    return config_of


def test_the_vector_of_qwen35():
    with GGUFFile.open(DATA / "qwen35.gguf") as gguf:
        config = ModelConfig.from_gguf(gguf)
    assert config.hybrid == HybridConfig(
        recurrent=(True, True, True, False), state_size=16, n_key_head=2, n_value_head=4, n_taps=4, n_nextn=1,
        nextn_tensors=("shared_head_norm",),
    )  # fmt: skip
    assert (config.n_layer, config.head_dim, config.n_rot, config.experts) == (4, 16, 8, None)
    assert (config.attention_layers, config.recurrent_layers) == ((3,), (0, 1, 2))
    assert (config.hybrid.n_channels, config.hybrid.n_embd_value) == (128, 64)


def test_the_vector_of_qwen35moe():
    with GGUFFile.open(DATA / "qwen35moe.gguf") as gguf:
        config = ModelConfig.from_gguf(gguf)
    assert config.experts == ExpertConfig(n_expert=6, n_used=2, n_ff=48, n_ff_shared=96)


@pytest.mark.parametrize("name", NAMES)
def test_expected_tensors_are_those_of_the_file(name):
    with GGUFFile.open(DATA / f"{name}.gguf") as gguf:
        config = ModelConfig.from_gguf(gguf)
        check_tensors(gguf, config)
        found = {each: info.shape for each, info in gguf.tensors.items()}
    # One matrix of a row is a vector in files.
    wanted = {each: shape[1:] if shape[0] == 1 else shape for each, shape in expected_tensors(config).items()}
    assert found == wanted
    assert {each for each in wanted if each not in loaded_tensors(config, draft=False)} == {
        each for each in found if each.startswith("blk.4.")
    }
    assert loaded_tensors(config, draft=True) == expected_tensors(config)


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
@pytest.mark.parametrize("n_nextn", [0, 1])
def test_small_models(config_of, arch, n_nextn):
    config = config_of(tiny(arch, n_nextn))
    assert config.n_layer == 2
    assert config.hybrid.recurrent == (True, False)
    assert config.hybrid.nextn_tensors == ()
    assert all(
        name.startswith("blk.2.")
        for name in set(expected_tensors(config)) - set(loaded_tensors(config, draft=False))
    )
    assert ("blk.2.nextn.eh_proj.weight" in expected_tensors(config)) == (n_nextn == 1)


def test_widths_of_experts_follow_from_that_of_the_model(config_of):
    model = tiny("qwen35moe").add("qwen35moe.feed_forward_length", U32, 12)
    del model.kv["qwen35moe.expert_feed_forward_length"]
    assert config_of(model).experts.n_ff == 12 // 2
    del model.kv["qwen35moe.feed_forward_length"]
    with pytest.raises(ModelFileError, match=r"qwen35moe\.expert_feed_forward_length': is missing"):
        config_of(model)


def test_a_map_of_layers_goes_before_the_interval(config_of):
    model = tiny().add("qwen35.full_attention_interval", U32, 1)
    model.add_array("qwen35.attention.recurrent_layers", BOOL, [1, 0, 0])
    assert config_of(model).recurrent_layers == (0,)


def changed(key, kind, value, arch="qwen35"):
    def build():
        return tiny(arch).add(f"{arch}.{key}", kind, value)

    return build


def listed(key, kind, values):
    def build():
        model = tiny()
        model.kv[f"qwen35.{key}"] = (ARR, array(kind, values))
        return model

    return build


def without(key):
    def build():
        model = tiny()
        del model.kv[f"qwen35.{key}"]
        return model

    return build


def extra(name, ne, arch="qwen35"):
    def build():
        model = tiny(arch)
        model.tensors.append(Tensor(name, ne))
        return model

    return build


def lacking(name):
    def build():
        model = tiny()
        model.tensors = [tensor for tensor in model.tensors if tensor.name != name]
        return model

    return build


def reshaped(name, ne):
    def build():
        model = tiny()
        next(tensor for tensor in model.tensors if tensor.name == name).ne = ne
        return model

    return build


MALFORMED = {
    "all blocks MTP": (changed("nextn_predict_layers", U32, 3), r"nextn_predict_layers': is 3; want at most 2"),
    "heads not shared out": (changed("ssm.group_count", U32, 3), r"time_step_rank': is 4; want a multiple .* 3"),
    "width that is not heads": (changed("ssm.inner_size", U32, 17), r"inner_size': is 17; want .*, 16"),
    "one tap": (changed("ssm.conv_kernel", U32, 1), r"conv_kernel': is 1; want at least 2"),
    "state size 0": (changed("ssm.state_size", U32, 0), r"state_size': is 0; want at least 1"),
    "interval 0": (changed("full_attention_interval", U32, 0), r"full_attention_interval': is 0"),
    "no sections": (without("rope.dimension_sections"), r"dimension_sections': is missing"),
    "three sections": (listed("rope.dimension_sections", U32, [1, 1, 1]), r"has 3 elements; want 4"),
    "no taps": (without("ssm.conv_kernel"), r"conv_kernel': is missing"),
    "a map too short": (listed("attention.recurrent_layers", BOOL, [1, 0]), r"has 2 elements; want 3"),
    "a map of numbers": (listed("attention.recurrent_layers", U32, [1, 0, 0]), r"want an array of booleans"),
    "a map that is one number": (changed("attention.recurrent_layers", BOOL, 1), r"want an array of booleans"),
    "a recurrent MTP block": (listed("attention.recurrent_layers", BOOL, [1, 0, 1]), r"true for block 2"),
    "more experts used than there are": (
        changed("expert_used_count", U32, 4, "qwen35moe"), r"expert_used_count': is 4; want at most 3"
    ),
    "no decay": (lacking("blk.0.ssm_a"), r"'blk\.0\.ssm_a': is missing"),
    "no projection": (lacking("blk.2.nextn.eh_proj.weight"), r"nextn\.eh_proj\.weight': is missing"),
    "another convolution": (
        reshaped("blk.0.ssm_conv1d.weight", [3, CHANNELS]), rf"has shape \[{CHANNELS}, 3\]; want"
    ),
    "queries without gates": (
        reshaped("blk.1.attn_q.weight", [N_EMBD, 2 * HEAD_DIM]), r"attn_q\.weight': has shape \[8, 8\]"
    ),
    "a block too many": (extra("blk.3.attn_norm.weight", [N_EMBD]), r"is of layer 3; want layers 0 to 2"),
}  # fmt: skip

UNSUPPORTED = {
    "two MTP blocks": (lambda: tiny(n_nextn=2), r"nextn_predict_layers': not supported; is 2"),
    "a pair without an axis": (
        listed("rope.dimension_sections", U32, [1, 0, 0, 1]), r"is \[1, 0, 0, 1\], which leaves pair 1 of 2"
    ),
    "no section at all": (listed("rope.dimension_sections", U32, [0, 0, 0, 0]), r"leaves pair 0 of 2"),
    "no attention": (listed("attention.recurrent_layers", BOOL, [1, 1, 0]), r"all 2 layers are recurrent"),
    "nothing but attention": (changed("full_attention_interval", U32, 1), r"all 2 layers are attention"),
    "fused attention": (
        extra("blk.1.attn_qkv.weight", [N_EMBD, 24]), r"'blk\.1\.attn_qkv\.weight': not supported; queries"
    ),
    "fused attention of the MTP block": (
        extra("blk.2.attn_qkv.weight", [N_EMBD, 24]), r"'blk\.2\.attn_qkv\.weight': not supported; queries"
    ),
    "fused experts": (
        extra("blk.0.ffn_gate_up_exps.weight", [N_EMBD, 12, 3], "qwen35moe"), r"gates and ups in one"
    ),
    "a bias": (extra("blk.1.attn_q.bias", [16]), r"'blk\.1\.attn_q\.bias': not supported; a bias"),
    "a scale": (extra("blk.1.attn_q.scale", [1]), r"'blk\.1\.attn_q\.scale': not supported"),
    "experts of a dense model": (
        extra("blk.1.ffn_gate_inp.weight", [N_EMBD, 3]), r"a tensor of a mixture of experts"
    ),
    "expert keys of a dense model": (changed("expert_count", U32, 4), r"mixture of experts; want 0"),
    "an MTP block alone": (lacking("blk.0.attn_norm.weight"), r"an MTP block alone; want the trunk"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_what_no_sound_model_has_is_refused(config_of, name):
    build, message = MALFORMED[name]
    with pytest.raises(ModelFileError, match=message):
        config_of(build())


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_does_not_run_is_refused_by_name(config_of, name):
    build, message = UNSUPPORTED[name]
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(build())


def test_a_model_that_is_not_hybrid_has_none_of_it(config_of):
    config = config_of(tiny_llama(n_layer=2))
    assert (config.hybrid, config.experts) == (None, None)
    assert (config.attention_layers, config.recurrent_layers) == ((0, 1), ())
    assert loaded_tensors(config, draft=False) == expected_tensors(config)
    assert loaded_tensors(config, draft=True) == expected_tensors(config)


@pytest.mark.parametrize(
    "change",
    [
        {"recurrent": (True, True)},
        {"recurrent": (False,)},
        {"state_size": 0},
        {"n_value_head": 3},
        {"n_taps": 1},
        {"n_nextn": -1},
    ],
    ids=str,
)
def test_a_hybrid_configuration_holds_its_invariants(config_of, change):
    with pytest.raises(ValueError, match="want"):
        dataclasses.replace(config_of(tiny()).hybrid, **change)


@pytest.mark.parametrize("change", [{"n_used": 0}, {"n_used": 4}, {"n_ff": 0}, {"n_ff_shared": 0}], ids=str)
def test_an_expert_configuration_holds_its_invariants(config_of, change):
    with pytest.raises(ValueError, match="want"):
        dataclasses.replace(config_of(tiny("qwen35moe")).experts, **change)


def test_kinds_of_layers_are_as_many_as_layers(config_of):
    with pytest.raises(ValueError, match="as many kinds"):
        dataclasses.replace(config_of(tiny()), n_layer=3)
