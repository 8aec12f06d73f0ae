"""GGUF files byte by byte, sound ones and a catalogue of damaged ones. Independent of the engine's parser.

``CASES[name]()`` gives the bytes of a file that must be refused with one line that contains
``CASES[name].culprit``. Names after llama.cpp's tests/test-gguf.cpp where it has the case; #N is the number
of llama.cpp's issue or change that the case comes from.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
TYPE_F32, TYPE_Q4_0, TYPE_I8, TYPE_I64 = 0, 2, 24, 27
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B"}
_FORMATS |= {U64: "Q", I64: "q", F64: "d"}
MINUS_1 = 2**64 - 1


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def scalar(kind: int, value: object) -> bytes:
    return text(value) if kind == STR else struct.pack("<" + _FORMATS[kind], value)


def array(element: int, values: list) -> bytes:
    return u32(element) + u64(len(values)) + b"".join(scalar(element, value) for value in values)


@dataclass
class Tensor:
    """A tensor's entry and data. ``ne`` is in GGUF's order, the contiguous dimension first."""

    name: str | bytes
    ne: list[int]
    kind: int = TYPE_F32
    data: bytes | None = None  # None: zeros of 4 bytes an element
    offset: int | None = None  # None: where it lies
    n_dims: int | None = None

    def payload(self) -> bytes:
        return bytes(4 * math.prod(self.ne)) if self.data is None else self.data


@dataclass
class GGUF:
    """A file under construction. Each header field can be made to lie."""

    kv: dict[str | bytes, tuple[int, bytes]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    n_kv: int | None = None
    n_tensors: int | None = None
    alignment: int = 32  # of the bytes that are written, whatever general.alignment says
    raw_kv: bytes = b""  # appended to the metadata as it is, and counted as one key

    def add(self, key: str | bytes, kind: int, value: object) -> GGUF:
        self.kv[key] = (kind, scalar(kind, value))
        return self

    def add_array(self, key: str | bytes, element: int, values: list) -> GGUF:
        self.kv[key] = (ARR, array(element, values))
        return self

    def build(self) -> bytes:
        n_kv = len(self.kv) + bool(self.raw_kv) if self.n_kv is None else self.n_kv
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        head = self.magic + u32(self.version) + u64(n_tensors) + u64(n_kv)
        for key, (kind, payload) in self.kv.items():
            head += text(key) + u32(kind) + payload
        head += self.raw_kv
        data = b""
        for tensor in self.tensors:
            n_dims = len(tensor.ne) if tensor.n_dims is None else tensor.n_dims
            head += text(tensor.name) + u32(n_dims) + b"".join(u64(extent % 2**64) for extent in tensor.ne)
            head += u32(tensor.kind) + u64(len(data) if tensor.offset is None else tensor.offset)
            if tensor.offset is None:
                data += tensor.payload()
                data += bytes(-len(data) % self.alignment)
        return head + bytes(-len(head) % self.alignment) + data if self.tensors else head


N_VOCAB, N_EMBD, N_FF, N_HEAD, N_HEAD_KV = 12, 8, 16, 2, 1


def tiny_llama(arch: str = "llama", n_layer: int = 1) -> GGUF:
    """Build a sound model of about 4 kB: 1 layer, n_embd 8, n_ff 16, 2 heads, 12 tokens, output tied."""
    gguf = GGUF()
    gguf.add("general.architecture", STR, arch)
    gguf.add("general.name", STR, "tiny")
    gguf.add(f"{arch}.block_count", U32, n_layer)
    gguf.add(f"{arch}.context_length", U32, 64)
    gguf.add(f"{arch}.embedding_length", U32, N_EMBD)
    gguf.add(f"{arch}.feed_forward_length", U32, N_FF)
    gguf.add(f"{arch}.attention.head_count", U32, N_HEAD)
    gguf.add(f"{arch}.attention.head_count_kv", U32, N_HEAD_KV)
    gguf.add(f"{arch}.attention.layer_norm_rms_epsilon", F32, 1e-5)
    gguf.add("tokenizer.ggml.model", STR, "gpt2")
    gguf.add("tokenizer.ggml.add_bos_token", BOOL, 0)
    gguf.add_array("tokenizer.ggml.tokens", STR, [*"abcdefghij", "Ġ", "日本"])
    gguf.add_array("tokenizer.ggml.token_type", I32, [1] * N_VOCAB)
    gguf.add_array("tokenizer.ggml.merges", STR, ["a b", "c d"])
    head_dim = N_EMBD // N_HEAD
    gguf.tensors = [Tensor("token_embd.weight", [N_EMBD, N_VOCAB]), Tensor("output_norm.weight", [N_EMBD])]
    for layer in range(n_layer):
        shapes = {
            "attn_norm": [N_EMBD],
            "attn_q": [N_EMBD, N_HEAD * head_dim],
            "attn_k": [N_EMBD, N_HEAD_KV * head_dim],
            "attn_v": [N_EMBD, N_HEAD_KV * head_dim],
            "attn_output": [N_HEAD * head_dim, N_EMBD],
            "ffn_norm": [N_EMBD],
            "ffn_gate": [N_EMBD, N_FF],
            "ffn_up": [N_EMBD, N_FF],
            "ffn_down": [N_FF, N_EMBD],
        }
        if arch == "qwen3":
            shapes |= {"attn_q_norm": [head_dim], "attn_k_norm": [head_dim]}
        gguf.tensors += [Tensor(f"blk.{layer}.{name}.weight", ne) for name, ne in shapes.items()]
    return gguf


@dataclass(frozen=True)
class Case:
    """A file to refuse. ``needs_config``: it opens, but no model configuration comes out of it."""

    build: Callable[[], bytes]
    culprit: str
    needs_config: bool = False
    supported: bool = True  # False: sound, but of a kind that the engine does not run

    def __call__(self) -> bytes:
        return self.build()


CASES: dict[str, Case] = {}


def _whole(name: str, culprit: str, build: Callable[[], bytes]) -> None:
    CASES[name] = Case(build, culprit)


def _header(name: str, culprit: str, **fields: object) -> None:
    CASES[name] = Case(lambda: GGUF(**fields).build() + bytes(64), culprit)


def _kv(name: str, culprit: str, raw: bytes) -> None:
    # 256 bytes more: a length that is merely wrong and one that leaves the file are different cases.
    CASES[name] = Case(lambda: GGUF(raw_kv=raw + bytes(256)).add("general.name", STR, "x").build(), culprit)


def _tensor(name: str, culprit: str, *tensors: Tensor, alignment: int = 32) -> None:
    CASES[name] = Case(lambda: GGUF(tensors=list(tensors), alignment=alignment).build(), culprit)


def _align(name: str, kind: int, value: object) -> None:
    CASES[name] = Case(
        lambda: GGUF(tensors=[Tensor("t", [8])]).add("general.alignment", kind, value).build(),
        "general.alignment",
    )


def _model(name: str, culprit: str, change: Callable[[GGUF], object], *, supported: bool = True) -> None:
    def build() -> bytes:
        gguf = tiny_llama()
        change(gguf)
        return gguf.build()

    CASES[name] = Case(build, culprit, needs_config=True, supported=supported)


# Header
_whole("empty_file", "empty", lambda: b"")
_whole("three_bytes", "truncated", lambda: b"GGU")
_whole("half_header", "truncated", lambda: GGUF().build()[:20])
_whole("text_file", "magic", lambda: b"This is not the model that you look for.\n" * 4)
_whole("other_short_file", "GGUF", lambda: b"PK\x03\x04")
_header("header_bad_magic", "magic", magic=b"FUGG")
_header("header_bad_version_0", "version", version=0)
_header("header_bad_version_1", "version", version=1)
_header("header_bad_version_future", "version", version=4)
_header("header_big_endian", "big-endian", version=3 << 24)
_header("header_bad_n_tensors", "n_tensors", n_tensors=MINUS_1)
_header("header_bad_n_kv", "n_kv", n_kv=MINUS_1)
_header("header_n_tensors_overflow", "n_tensors", n_tensors=2**60 + 1)  # #14595, #19856, CVE-2025-53630
_header("header_n_tensors_beyond_file", "n_tensors", n_tensors=1000)
_header("header_n_kv_beyond_file", "n_kv", n_kv=1000)
_header("header_one_kv_of_zeros", "key 0", n_kv=1)

# Metadata
_KEY = text("bad.key")
_kv("kv_bad_key_size", "key 1", u64(MINUS_1) + b"bad.key")
_kv("kv_key_leaves_file", "key 1", u64(5000) + b"bad.key")
_kv("kv_key_too_long", "key 1", text("k" * 70_000) + u32(U8) + b"\1")
_kv("kv_empty_key", "key 1", text("") + u32(U8) + b"\1")
_kv("kv_key_not_utf8", "key 1", text(b"bad\xff") + u32(U8) + b"\1")
_kv("kv_key_with_nul", "NUL", text("general\0x") + u32(U8) + b"\1")
_kv("kv_bad_type", "bad.key", _KEY + u32(13) + u64(0))
_kv("kv_duplicate_key", "general.name", text("general.name") + u32(STR) + text("y"))
_kv("kv_string_length_minus_1", "bad.key", _KEY + u32(STR) + u64(MINUS_1))  # #15711
_kv("kv_string_length_wraps_offset", "bad.key", _KEY + u32(STR) + u64(2**64 - 40))
_kv("kv_string_too_long", "bad.key", _KEY + u32(STR) + u64(2**40))  # #19003
_kv("kv_string_leaves_file", "bad.key", _KEY + u32(STR) + u64(300))
_kv("kv_string_not_utf8", "bad.key", _KEY + u32(STR) + text(b"abc\xfe"))
_kv("kv_string_cut_character", "bad.key", _KEY + u32(STR) + text(b"abc\xe6\x97"))
_kv("kv_string_surrogate", "bad.key", _KEY + u32(STR) + text(b"\xed\xa0\x80"))
_kv("kv_bool_2", "bad.key", _KEY + u32(BOOL) + b"\2")
_kv("kv_bool_array_2", "bad.key", _KEY + u32(ARR) + u32(BOOL) + u64(3) + b"\0\1\2")
_kv("kv_array_element_unknown", "bad.key", _KEY + u32(ARR) + u32(77) + u64(1) + u64(0))  # #26690
_kv("kv_array_nested", "bad.key", _KEY + u32(ARR) + u32(ARR) + u64(1) + array(U8, [1]))
_kv("kv_array_minus_1", "bad.key", _KEY + u32(ARR) + u32(U8) + u64(MINUS_1))
_kv("kv_array_size_overflow", "bad.key", _KEY + u32(ARR) + u32(U64) + u64(2**61 + 1))
_kv("kv_array_leaves_file", "bad.key", _KEY + u32(ARR) + u32(F64) + u64(33))
_kv("kv_strings_minus_1", "bad.key", _KEY + u32(ARR) + u32(STR) + u64(MINUS_1))
_kv("kv_strings_2_30", "bad.key", _KEY + u32(ARR) + u32(STR) + u64(2**30))
_kv("kv_strings_leave_file", "bad.key", _KEY + u32(ARR) + u32(STR) + u64(33))
_kv(
    "kv_strings_element_minus_1",
    "'bad.key' element 1",
    _KEY + u32(ARR) + u32(STR) + u64(2) + text("a") + u64(MINUS_1),
)
_kv(
    "kv_strings_element_leaves_file",
    "'bad.key' element 1",
    _KEY + u32(ARR) + u32(STR) + u64(2) + text("a") + u64(300),
)
_kv("kv_strings_not_utf8", "'bad.key' element 1", _KEY + u32(ARR) + array(STR, ["a", b"\x80", "b"]))
_align("kv_bad_align_0", U32, 0)  # #24997
_align("kv_bad_align_1", U32, 1)
_align("kv_bad_align_4", U32, 4)
_align("kv_bad_align_13", U32, 13)
_align("kv_bad_align_48", U32, 48)
_align("kv_bad_align_2_31", U32, 2**31)
_align("kv_wrong_type_align_i32", I32, 32)
_align("kv_wrong_type_align_u64", U64, 32)
_align("kv_wrong_type_align_str", STR, "32")
CASES["kv_wrong_type_align_array"] = Case(
    lambda: GGUF().add_array("general.alignment", U32, [32]).build(), "general.alignment"
)
_whole("kv_truncated", "truncated", lambda: tiny_llama().build()[:600])

# Tensors
_tensor("tensors_bad_name_size", "tensor 0 name", Tensor("n" * 64, [8]))
_tensor("tensors_empty_name", "tensor 0 name", Tensor("", [8]))
_tensor("tensors_name_not_utf8", "tensor 0 name", Tensor(b"bad\xff", [8]))
_tensor("tensors_name_with_newline", "'a\\nb'", Tensor("a\nb", [8], kind=99))
_tensor("tensors_n_dims_0", "'bad'", Tensor("bad", [], data=bytes(32)))
_tensor("tensors_n_dims_5", "'bad'", Tensor("bad", [1, 1, 1, 1, 8]))
_tensor("tensors_n_dims_2_32", "'bad'", Tensor("bad", [8], n_dims=2**32 - 1))
_tensor("tensors_negative_dim", "'bad'", Tensor("bad", [8, -1], data=b""))
_tensor("tensors_zero_dim", "'bad'", Tensor("bad", [8, 0], data=bytes(32)))
_tensor("tensors_ne_too_big", "'bad'", Tensor("bad", [2**32, 2**32], data=bytes(32)))  # #27203
_tensor("tensors_ne_wraps_to_small", "'bad'", Tensor("bad", [8, 2**61 + 1], data=bytes(32)))
_tensor("tensors_nbytes_too_big", "'bad'", Tensor("bad", [2**61], kind=TYPE_I64, data=bytes(32)))
_tensor(
    "tensors_nbytes_pad_wrap", "'bad'", Tensor("bad", [2**63 - 1], kind=TYPE_I8, data=bytes(32))
)  # #24759
_tensor("tensors_bad_type", "'bad'", Tensor("bad", [8], kind=2**32 - 1))
_tensor("tensors_removed_type", "'bad'", Tensor("bad", [32], kind=4))  # Q4_2
_tensor("tensors_row_cuts_block", "'bad'", Tensor("bad", [33, 2], kind=TYPE_Q4_0, data=bytes(64)))
_tensor("tensors_bad_offset", "'bad'", Tensor("ok", [64]), Tensor("bad", [8], offset=1))
_tensor("tensors_offset_beyond", "'bad'", Tensor("ok", [8]), Tensor("bad", [8], offset=2**20))
_tensor("tensors_offset_wraps", "'bad'", Tensor("ok", [64]), Tensor("bad", [8], offset=2**64 - 32))
_tensor("tensors_overlap", "overlaps 'ok'", Tensor("ok", [64]), Tensor("bad", [8], offset=32))
_tensor("tensors_same_offset", "overlaps", Tensor("ok", [8]), Tensor("bad", [8], offset=0))
_tensor("tensors_duplicate_name", "'same'", Tensor("same", [8]), Tensor("same", [8]))
_tensor("tensors_inconsistent_align", "'bad'", Tensor("ok", [9]), Tensor("bad", [9]), alignment=1)
_tensor(  # CVE-2026-27940, CVE-2026-33298
    "data_mem_size_overflow",
    "'bad0'",
    Tensor("bad0", [2**63 - 64], kind=TYPE_I8, data=bytes(32)),
    Tensor("bad1", [2**63 - 64], kind=TYPE_I8, data=bytes(32)),
)
_whole("tensors_truncated", "truncated", lambda: GGUF(tensors=[Tensor("t", [8])]).build()[:50] + bytes(7))
_whole("data_one_byte_missing", "'t'", lambda: GGUF(tensors=[Tensor("t", [8])]).build()[:-1])
_whole("data_not_there", "truncated", lambda: tiny_llama().build()[:1900])

# Hyperparameters, #25969
_A = "llama"
_model("arch_missing", "general.architecture", lambda g: g.kv.pop("general.architecture"))
_model("arch_wrong_type", "general.architecture", lambda g: g.add("general.architecture", U32, 1))
_model("arch_unknown", "'mamba'", lambda g: g.add("general.architecture", STR, "mamba"), supported=False)
_model("arch_empty", "''", lambda g: g.add("general.architecture", STR, ""), supported=False)


def _range(key: str, kind: int, *values: object) -> None:
    for index, value in enumerate(values):
        _model(f"{key}_{index}", key, lambda g, value=value: g.add(f"{_A}.{key}", kind, value))


_range("block_count", U32, 0, 513, 2**32 - 1)  # #25821, #26051
_range("context_length", U32, 0, 2**24 + 1)
_range("embedding_length", U32, 0, 2**31)
_range("feed_forward_length", U64, 0, 2**63)
_range("attention.head_count", U32, 0, 3, 2**31)
_range("attention.head_count_kv", U32, 0, 3, 2**31)
_range("attention.key_length", I64, 0, -4, 2**40)
_range("attention.layer_norm_rms_epsilon", F32, 0.0, -1e-5, math.nan, math.inf, 2.0)
_range("rope.dimension_count", I32, 0, 3, 6, -2)
_range("rope.freq_base", F32, 0.0, -1.0, math.nan, math.inf)
_range("rope.scaling.factor", F32, -1.0, math.nan, 1e-30)
_range("vocab_size", U32, 0, 11, 2**31)
_model("block_count_missing", "llama.block_count", lambda g: g.kv.pop("llama.block_count"))
_model("block_count_str", "llama.block_count", lambda g: g.add("llama.block_count", STR, "1"))
_model("block_count_bool", "llama.block_count", lambda g: g.add("llama.block_count", BOOL, 1))
_model("eps_int", "epsilon", lambda g: g.add("llama.attention.layer_norm_rms_epsilon", U32, 0))
_model("heads_wrong_count", "head_count", lambda g: g.add_array("llama.attention.head_count", U32, [2, 2]))
_model("heads_float_array", "head_count", lambda g: g.add_array("llama.attention.head_count", F32, [2.0]))
_model("tokens_missing", "tokenizer.ggml.tokens", lambda g: g.kv.pop("tokenizer.ggml.tokens"))
_model("tokens_of_numbers", "tokens", lambda g: g.add_array("tokenizer.ggml.tokens", U32, [1] * N_VOCAB))
_model("tokens_scalar", "tokens", lambda g: g.add("tokenizer.ggml.tokens", STR, "abc"))
_model("tokens_none", "tokens", lambda g: g.add_array("tokenizer.ggml.tokens", STR, []))
_model("split_file", "split.count", lambda g: g.add("split.count", U16, 2), supported=False)
_model("experts", "expert_count", lambda g: g.add("llama.expert_count", U32, 8), supported=False)
_model("not_causal", "causal", lambda g: g.add("llama.attention.causal", BOOL, 0), supported=False)
_model("rope_yarn", "'yarn'", lambda g: g.add("llama.rope.scaling.type", STR, "yarn"), supported=False)
_model(
    "rope_attn", "attn_factor", lambda g: g.add("llama.rope.scaling.attn_factor", F32, 2.0), supported=False
)
_model(
    "value_length", "value_length", lambda g: g.add("llama.attention.value_length", U32, 8), supported=False
)

# Tensors that disagree with the architecture


def _without(name: str) -> Callable[[GGUF], object]:
    def change(gguf: GGUF) -> None:
        gguf.tensors = [tensor for tensor in gguf.tensors if tensor.name != name]

    return change


def _reshaped(name: str, ne: list[int]) -> Callable[[GGUF], object]:
    def change(gguf: GGUF) -> None:
        next(tensor for tensor in gguf.tensors if tensor.name == name).ne = ne

    return change


def _with(name: str, ne: list[int]) -> Callable[[GGUF], object]:
    return lambda gguf: gguf.tensors.append(Tensor(name, ne))


for _name in ("token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.0.ffn_norm.weight"):
    _model(f"missing_{_name}", f"'{_name}'", _without(_name))
_model("layers_missing", "blk.1.attn_norm.weight", lambda g: g.add("llama.block_count", U32, 512))
_model("shape_rows", "'token_embd.weight'", _reshaped("token_embd.weight", [N_EMBD, N_VOCAB + 1]))
_model("shape_transposed", "'blk.0.ffn_down.weight'", _reshaped("blk.0.ffn_down.weight", [N_EMBD, N_FF]))
_model("shape_dims", "'blk.0.attn_q.weight'", _reshaped("blk.0.attn_q.weight", [N_EMBD * N_EMBD]))
_model("shape_norm", "'output_norm.weight'", _reshaped("output_norm.weight", [N_EMBD - 1]))
_model("shape_rope_freqs", "'rope_freqs.weight'", _with("rope_freqs.weight", [3]))
_model("layer_beyond", "'blk.1.attn_norm.weight'", _with("blk.1.attn_norm.weight", [N_EMBD]))
for _name in (
    "attn_q.bias",
    "attn_output.bias",
    "ffn_gate_inp.weight",
    "ffn_up_exps.weight",
    "ffn_up.0.weight",
):
    _model(f"unused_{_name}", f"'blk.0.{_name}'", _with(f"blk.0.{_name}", [N_EMBD]), supported=False)
_model("unused_qk_norm", "attn_q_norm", _with("blk.0.attn_q_norm.weight", [4]), supported=False)
_model("unused_unknown", "'mystery'", _with("mystery", [4]), supported=False)
