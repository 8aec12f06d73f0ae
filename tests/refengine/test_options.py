"""Options are refused by name, with what to give instead."""

import pytest
from engines import DATA
from hypothesis import given
from hypothesis import strategies as st

import refengine
from instrumentation.errors import BadInputError
from refengine.config import ModelConfig
from refengine.gguf_file import GGUFFile
from refengine.options import EngineOptions

WHOLE = ("n_ctx", "n_batch", "n_ubatch", "n_slots", "draft_n_max", "draft_n_min")


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    with GGUFFile.open(DATA / "llama.gguf") as gguf:
        return ModelConfig.from_gguf(gguf)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [-1, 1.0, "8", None, True, 2**40])
def test_sizes_are_whole_numbers_in_range(name, value):
    with pytest.raises(BadInputError, match=rf"^{name} is .*; give a whole number from [01] to \d+$"):
        EngineOptions(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check": "loud"}, "check level 'loud' is unknown; use one of off, guard, audit, trap"),
        ({"check": None}, "check level None is unknown"),
        ({"cache_type_k": "q3"}, "cache_type_k 'q3' is unknown; use one of f32, f16, bf16, q8_0"),
        ({"cache_type_v": "q3"}, "cache_type_v 'q3' is unknown; use one of f32, f16, bf16, q8_0"),
        ({"cache_type_k": ["f16"]}, r"cache_type_k is \['f16'\]; give text"),
        ({"device": None}, "device is None; give text"),
        ({"device_memory_limit": 0}, "device_memory_limit asks for 0 bytes; give a whole number above 0"),
        ({"device_memory_limit": "1G"}, "device_memory_limit asks for '1G' bytes"),
        ({"cuda_graphs": 1}, "cuda_graphs is 1; give True or False"),
        ({"fast": True}, "fast=True is not built yet"),
        ({"spec_type": "draft-mpt"}, "spec_type 'draft-mpt' is unknown; use one of none, draft-mtp"),
        ({"draft_n_max": 0}, "draft_n_max is 0; give a whole number from 1 to 31"),
        ({"draft_n_max": 32}, "draft_n_max is 32; give a whole number from 1 to 31"),
        ({"draft_n_min": 4}, "draft_n_min is 4; give at most draft_n_max, which is 3"),
        ({"draft_p_min": 1.5}, "draft_p_min is 1.5; give a probability from 0 to 1"),
        ({"draft_p_min": float("nan")}, "draft_p_min is nan; give a probability"),
        ({"draft_p_min": "0.5"}, "draft_p_min is '0.5'; give a probability"),
        ({"draft_p_min": True}, "draft_p_min is True; give a probability"),
        ({"kv_unified": "no"}, "kv_unified is 'no'; give True or False"),
        ({"n_ubatch": 65536}, "n_ubatch is 65536; give a whole number from 1 to 65535"),
    ],
)
def test_values_are_refused_by_name(options, message):
    with pytest.raises(BadInputError, match=message):
        EngineOptions(**options)


def test_an_option_that_there_is_not_is_named():
    with pytest.raises(TypeError, match="n_cxt"):
        refengine.load(DATA / "llama.gguf", n_cxt=512)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device 'gpu' is unknown"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": "many"}, "threads is 'many'"),
        ({"n_ctx": 1 << 20}, "n_ctx is 1048576; this model was trained for at most"),
    ],
)
def test_load_refuses_what_only_it_can_see(options, message):
    with pytest.raises(BadInputError, match=message):
        refengine.load(DATA / "llama.gguf", **options)


def test_n_ctx_0_is_the_models_own(config):
    assert EngineOptions().context_settings(config).n_ctx == config.n_ctx_train
    assert EngineOptions(n_ctx=config.n_ctx_train).context_settings(config).n_ctx == config.n_ctx_train
    with pytest.raises(
        BadInputError, match=f"n_ctx is {config.n_ctx_train + 1}; .*at most {config.n_ctx_train}$"
    ):
        EngineOptions(n_ctx=config.n_ctx_train + 1).context_settings(config)


@given(n_batch=st.integers(1, 10_000), n_ubatch=st.integers(1, 10_000))
def test_a_micro_batch_is_no_larger_than_a_batch(config, n_batch: int, n_ubatch: int):
    settings = EngineOptions(n_batch=n_batch, n_ubatch=n_ubatch).context_settings(config)
    assert settings.n_batch == n_batch
    assert settings.n_ubatch == min(n_batch, n_ubatch)
    [worst] = settings.worst_shapes
    assert 1 <= worst.n_outputs <= worst.n_tokens <= settings.n_ubatch


@pytest.mark.parametrize(("type_k", "type_v"), [("f32", "f16"), ("f16", "bf16"), ("bf16", "f32")])
def test_cache_types_reach_the_context(config, type_k, type_v):
    settings = EngineOptions(cache_type_k=type_k, cache_type_v=type_v).context_settings(config)
    assert (settings.cache_type_k, settings.cache_type_v) == (type_k, type_v)


@pytest.mark.parametrize("option", ["cache_type_k", "cache_type_v"])
def test_a_cache_type_that_the_models_heads_do_not_fit_is_refused(config, option):
    with pytest.raises(
        BadInputError, match=f"^{option} q8_0: .*this model's heads have 16 elements; use one"
    ):
        EngineOptions(**{option: "q8_0"}).context_settings(config)
