"""A tiny model of the form that examples/train_default trains, and the record of it that tests without PyTorch read.

python tests/support/tiny_default.py        writes tests/examples/tiny-default.gguf and .npz anew (needs PyTorch)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "examples" / "train_default"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))  # its files import one another by their names

N_VOCAB = 300
TEXT = "def read(self, size=-1):\n    if self.closed:\n        raise ValueError('closed')\n    return self.data\n\n\n"
GGUF = ROOT / "tests" / "examples" / "tiny-default.gguf"
RECORD = GGUF.with_suffix(".npz")


def tokenizer() -> Tokenizer:
    """A vocabulary of a few merges."""
    import corpus  # noqa: PLC0415 - after the path is set

    return corpus.train_tokenizer([TEXT * 3], N_VOCAB)


def model(seed: int = 0) -> Any:
    """A model with random parameters, none of them neutral: each layer, norm and gate changes what comes out."""
    import torch  # noqa: PLC0415 - not everyone has it
    from model import ModelConfig, Qwen35  # noqa: PLC0415

    config = ModelConfig(
        n_vocab=N_VOCAB, n_embd=32, n_layer=4, n_ff=64, n_head=4, n_head_kv=2, head_dim=16, n_rot=8, state_size=16,
        n_key_head=2, n_value_head=4, n_ctx=128,
    )  # fmt: skip
    torch.manual_seed(seed)
    made = Qwen35(config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif "norm" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    return made.eval()


def rounded(made: Any) -> None:
    """Give a model the parameters that its Q8_0 file holds."""
    import torch  # noqa: PLC0415
    from export import _KEPT  # noqa: PLC0415
    from gguf import GGMLQuantizationType  # noqa: PLC0415
    from gguf.quants import dequantize, quantize  # noqa: PLC0415

    q8 = GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 2 and not name.endswith(_KEPT):
                parameter.copy_(torch.from_numpy(dequantize(quantize(parameter.numpy(), q8), q8)))


def outputs(made: Any, tokens: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.float32]]:
    """What an engine calls hidden, logits and draft_logits of a text."""
    import torch  # noqa: PLC0415

    with torch.no_grad():
        ids = torch.from_numpy(tokens)[None]
        hidden = made.hidden(ids)
        drafted = made.blk[-1](made.embed(ids[:, 1:]), hidden[:, :-1], 1)[0]
        arrays = {"hidden": hidden, "logits": made.logits(hidden), "draft_logits": made.logits(drafted)}
    return {name: array[0].numpy() for name, array in arrays.items()}


def tokens(n: int = 66) -> npt.NDArray[np.int64]:
    """Some text of the tiny vocabulary."""
    return np.random.default_rng(5).integers(0, N_VOCAB, n)


def main() -> None:
    """Record."""
    from export import export  # noqa: PLC0415

    made = model()
    export(GGUF, made.state_dict(), made.config, tokenizer())
    rounded(made)
    np.savez_compressed(RECORD, tokens=tokens(), **outputs(made, tokens()))


if __name__ == "__main__":
    main()
