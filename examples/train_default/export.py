"""A trained model as a GGUF file.

python examples/train_default/export.py OUT/best.pt OUT/model.gguf      what train.py does at its end
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from corpus import END_OF_TEXT
from gguf.quants import quantize
from model import ModelConfig
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

ARCHITECTURE = "qwen35"
#: matrices that are too small to be worth rounding, by the ends of their names
_KEPT = ("ssm_conv1d.weight", "ssm_alpha.weight", "ssm_beta.weight")
_FILE_TYPES = {
    gguf.GGMLQuantizationType.F32: gguf.LlamaFileType.ALL_F32,
    gguf.GGMLQuantizationType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
}


def export(
    path: Path,
    state: Mapping[str, torch.Tensor],
    config: ModelConfig,
    bpe: Tokenizer,
    *,
    matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    about: Mapping[str, str] | None = None,
) -> None:
    """Write parameters under their names, matrices in a type of their own, and the vocabulary.

    about: ``general.*`` keys of type string. A ``n_vocab`` beyond the tokenizer's is filled up with unused tokens.
    """
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    for key, value in (about or {}).items():
        writer.add_string(f"general.{key}", value)
    writer.add_file_type(_FILE_TYPES[matrices])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_sizes(writer, config)
    _add_vocabulary(writer, config, bpe)
    for name, array in sorted(tensors(state).items()):
        if array.ndim == 2 and not name.endswith(_KEPT):
            writer.add_tensor(name, quantize(array, matrices), raw_dtype=matrices)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(state: Mapping[str, torch.Tensor]) -> dict[str, npt.NDArray[np.float32]]:
    """Arrays of a file, in C order: what the parameters are, but for ``ssm_a = -exp(ssm_a_log)``."""
    arrays = {}
    for name, parameter in state.items():
        array = parameter.detach().float().cpu().numpy()
        if name.endswith("ssm_a_log"):
            name, array = name.removesuffix("_log"), -np.exp(array)  # noqa: PLW2901 - the file's name for it
        arrays[name] = array
    return arrays


def _add_sizes(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.n_layer + 1)
    writer.add_uint32(f"{ARCHITECTURE}.nextn_predict_layers", 1)
    writer.add_context_length(config.n_ctx)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.n_ff)
    writer.add_vocab_size(config.n_vocab)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_head_kv)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_dimension_count(config.n_rot)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_rope_dimension_sections(config.rope_sections)
    writer.add_uint32(f"{ARCHITECTURE}.full_attention_interval", config.full_attention_interval)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.value_dim)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.n_value_head)
    writer.add_ssm_group_count(config.n_key_head)


def _add_vocabulary(writer: gguf.GGUFWriter, config: ModelConfig, bpe: Tokenizer) -> None:
    described = json.loads(bpe.to_str())
    ids = bpe.get_vocab()
    tokens = sorted(ids, key=lambda token: ids[token])
    unused = config.n_vocab - len(tokens)
    assert unused >= 0, (len(tokens), config.n_vocab)
    end = ids[END_OF_TEXT]
    types = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.UNUSED] * unused
    types[end] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens + [f"[UNUSED_{i}]" for i in range(unused)])
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in described["model"]["merges"]])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(end)
    writer.add_add_bos_token(value=False)


def export_checkpoint(checkpoint: Path, path: Path) -> None:
    """Write what ``train.py`` saved as its best."""
    saved: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
    bpe = Tokenizer.from_str(saved["tokenizer"])
    export(path, saved["model"], ModelConfig(**saved["config"]), bpe, about=saved["about"])


def main() -> None:
    """Export a checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("gguf", type=Path)
    arguments = parser.parse_args()
    export_checkpoint(arguments.checkpoint, arguments.gguf)
    print(f"{arguments.gguf}: {arguments.gguf.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
