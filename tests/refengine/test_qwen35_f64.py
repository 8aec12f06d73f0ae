"""The float64 model of qwen35 and qwen35moe against recorded logits, and what each part of it means for them."""

import functools
from pathlib import Path

import numpy as np
import pytest
from qwen35_f64 import Array, Qwen35, rotate, rotation

from refengine.kernels import experts, gates
from refengine.kernels.attention import attention_f64
from refengine.kernels.elementwise import swiglu_f64
from refengine.kernels.gated_delta import gated_delta_f64
from refengine.kernels.rope import rope_f64
from refengine.kernels.short_conv import short_conv_f64

DATA = Path(__file__).resolve().parent.parent / "data"
NAMES = ("qwen35", "qwen35-tied", "qwen35moe", "qwen35-Q4_K_M")


def nmse(found: Array, wanted: Array) -> float:
    wide = wanted.astype(np.float64)
    return float(((found - wide) ** 2).sum() / (wide**2).sum())


@functools.cache
def model(name: str) -> Qwen35:
    return Qwen35(DATA / f"{name}.gguf")


@functools.cache
def recorded(name: str) -> dict[str, Array]:
    with np.load(DATA / f"{name}.npz") as data:
        return dict(data)


@functools.cache
def hidden(name: str) -> Array:
    return model(name).hidden(recorded(name)["tokens"])


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_hidden_rows_are_those_recorded(name: str):
    wanted = recorded(name)
    assert nmse(hidden(name), wanted["h_nextn"]) <= 1e-11
    assert nmse(model(name).logits(hidden(name)), wanted["logits"]) <= 1e-11


@pytest.mark.parametrize("name", NAMES)
def test_draft_logits_are_those_recorded(name: str):
    assert nmse(model(name).drafts(recorded(name)["tokens"]), recorded(name)["mtp_logits"]) <= 1e-11


@pytest.mark.parametrize("name", NAMES)
def test_greedy_continuation_begins_as_recorded(name: str):
    wanted = recorded(name)
    assert model(name).logits(hidden(name))[-1].argmax() == wanted["greedy"][0]


def test_tied_and_untied_heads_are_both_covered():
    untied = {name: "output.weight" in model(name).weights for name in NAMES}
    assert untied["qwen35"]
    assert not untied["qwen35-tied"]


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "qwen35-Q4_K_M"])
def test_the_models_tell_tiled_from_grouped_heads_and_rotate_a_part(name: str):
    # Two key heads or more, each with two value heads or more: h % n_key_head differs from h // ratio.
    built = model(name)
    assert built.n_key_head >= 2
    assert built.n_value_head >= 2 * built.n_key_head
    assert built.n_rot < built.head_dim
    assert built.n_head >= 2


class _OfTwins(Qwen35):
    """The model with the kernels' twins in the place of its own formulas."""

    def __init__(self, name: str) -> None:
        self.__dict__.update(model(name).__dict__)

    def attention(self, layer: int, u: Array, position: Array) -> Array:
        n_rows, dim = len(u), self.head_dim
        q_gate = (u @ self.w(layer, "attn_q.weight").T).reshape(n_rows, self.n_head, 2 * dim)
        k, v = (
            (u @ self.w(layer, f"attn_{part}.weight").T).reshape(n_rows, self.n_head_kv, dim) for part in "kv"
        )
        q = gates.query_norm_f64(q_gate, self.w(layer, "attn_q_norm.weight"), self.eps)
        k = self.norm(k, self.w(layer, "attn_k_norm.weight"))
        # The engine's tables are float32; what is compared here is how they are used.
        tables = rotation(np.arange(position.max() + 1), self.n_rot, self.rope_base, self.sections)
        q, k = (rope_f64(x, position, *tables, "neox") for x in (q, k))
        o = attention_f64(q, k, v, position - position[0], dim**-0.5)
        return gates.output_gate_f64(o, q_gate).reshape(n_rows, -1) @ self.w(layer, "attn_output.weight").T

    def gated_delta_net(self, layer: int, u: Array) -> Array:
        n_rows, size, n_head = len(u), self.state_size, self.n_value_head
        mixed, z, beta, alpha = (
            u @ self.w(layer, f"{part}.weight").T
            for part in ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")
        )
        taps = self.w(layer, "ssm_conv1d.weight")
        qkv, _ = short_conv_f64(mixed, taps, np.zeros((taps.shape[1] - 1, mixed.shape[1])))
        pair = gates.delta_gates_f64(alpha, beta, self.w(layer, "ssm_dt.bias"), self.w(layer, "ssm_a"))
        y, _ = gated_delta_f64(qkv, pair, np.zeros((n_head, size, size)), self.eps)
        heads, z = (x.reshape(n_rows, n_head, size) for x in (y, z))
        gated = gates.gated_norm_f64(heads, self.w(layer, "ssm_norm.weight"), z, self.eps)
        return gated.reshape(n_rows, -1) @ self.w(layer, "ssm_out.weight").T

    def experts(self, layer: int, u: Array) -> Array:
        index, weight = experts.route_f64(u @ self.w(layer, "ffn_gate_inp.weight").T, self.n_used)
        gate, up, down = (self.w(layer, f"ffn_{part}_exps.weight") for part in ("gate", "up", "down"))
        both = swiglu_f64(*(experts.mul_mat_experts_f64(u[:, None], w, index) for w in (gate, up)))
        shared = swiglu_f64(*(u @ self.w(layer, f"ffn_{part}_shexp.weight").T for part in ("gate", "up")))
        shared = shared @ self.w(layer, "ffn_down_shexp.weight").T
        shared_gate = (u @ self.w(layer, "ffn_gate_inp_shexp.weight"))[:, None]
        return experts.combine_experts_f64(
            experts.mul_mat_experts_f64(both, down, index), weight, shared, shared_gate
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_twins_of_the_kernels_make_the_same_model(name: str):
    tokens = recorded(name)["tokens"]
    twins = _OfTwins(name)
    assert nmse(twins.hidden(tokens), hidden(name)) < 1e-20
    assert nmse(twins.drafts(tokens), model(name).drafts(tokens)) < 1e-20


class _Wrong(Qwen35):
    """A model with one mistake."""

    def __init__(self, mistake: str) -> None:
        self.__dict__.update(model("qwen35").__dict__)
        self.mistake = mistake

    def mtp_hidden(self, tokens: Array, hidden: Array, position: Array) -> Array:
        weights = dict(self.weights)
        prefix = f"blk.{self.n_layer}.nextn"
        if self.mistake == "hidden first":
            projection = weights[f"{prefix}.eh_proj.weight"]
            half = projection.shape[1] // 2
            weights[f"{prefix}.eh_proj.weight"] = np.roll(projection, half, axis=1)
        elif self.mistake == "no hnorm weight":
            weights[f"{prefix}.hnorm.weight"] = np.ones_like(weights[f"{prefix}.hnorm.weight"])
        elif self.mistake == "positions from 0":
            # Rotary angles are relative: this changes nothing, and shows that the others do.
            position = position - 1
        self.weights = weights
        return super().mtp_hidden(tokens, hidden, position)


@pytest.mark.parametrize(
    ("mistake", "shows"), [("hidden first", True), ("no hnorm weight", True), ("positions from 0", False)]
)
def test_a_mistake_in_the_mtp_block_changes_its_logits(mistake: str, shows: bool):
    wanted = recorded("qwen35")
    assert (nmse(_Wrong(mistake).drafts(wanted["tokens"]), wanted["mtp_logits"]) > 1e-6) == shows


def test_sections_that_cover_every_pair_are_ordinary_rope():
    position = np.arange(7)
    cosine, _ = rotation(position, 8, 1e7, [2, 1, 1, 0])
    angle = position[:, None] * 1e7 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_array_equal(cosine, np.cos(angle))


def test_a_pair_of_the_fourth_section_does_not_turn():
    x = np.random.default_rng(0).standard_normal((5, 1, 10))
    turned = rotate(x, *rotation(np.arange(5), 8, 1e7, [1, 1, 1, 1]))
    np.testing.assert_array_equal(turned[..., [3, 7, 8, 9]], x[..., [3, 7, 8, 9]])
    assert (turned[1:, :, [0, 1, 2]] != x[1:, :, [0, 1, 2]]).all()
