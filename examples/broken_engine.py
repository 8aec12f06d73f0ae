"""Another engine, with a fault: a recording says which tensor is the first wrong one.

Some NumPy computes a llama model, and rotates queries and keys in the wrong pairs. docs/golden.md tells how that is
found; as arguments it takes recordings to be held against, and ``--repaired``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

import refengine
from refengine.config import ModelConfig
from refengine.gguf_file import GGUFFile
from refengine.golden import case
from refengine.golden.fixture import Golden
from refengine.golden.record import Request, model_id, record

MODEL = Path(__file__).resolve().parent.parent / "tests" / "data" / "llama.gguf"
TOKENS = (1, 43, 210, 7, 98, 155, 301, 64)


class Engine:
    """A llama model in F32: ``tensors(tokens)`` are the results of its operations, by their usual names."""

    def __init__(self, path: Path, *, repaired: bool) -> None:
        self.repaired = repaired
        with GGUFFile.open(path) as gguf:
            self.config = ModelConfig.from_gguf(gguf)
            self.weights = {
                name: gguf.raw(name).view(np.float32).reshape(info.shape).copy()
                for name, info in gguf.tensors.items()
            }

    def tensors(self, tokens: tuple[int, ...]) -> dict[str, np.ndarray]:
        """All rows of every tensor."""
        w, c = self.weights, self.config
        found = {"inp_embd": w["token_embd.weight"][list(tokens)]}
        x = found["inp_embd"]
        for layer in range(c.n_layer):
            il, block = f"-{layer}", f"blk.{layer}"
            a = found[f"attn_norm{il}"] = self.norm(x, f"{block}.attn_norm.weight")
            q, k, v = (a @ w[f"{block}.attn_{part}.weight"].T for part in "qkv")
            found |= {f"Qcur{il}": q, f"Kcur{il}": k, f"Vcur{il}": v}
            found |= {f"Qcur_rope{il}": self.rope(q, c.n_head), f"Kcur_rope{il}": self.rope(k, c.n_head_kv)}
            a = self.attend(found[f"Qcur_rope{il}"], found[f"Kcur_rope{il}"], v)
            found[f"kqv_out{il}"] = a
            found[f"attn_out{il}"] = a @ w[f"{block}.attn_output.weight"].T
            x = found[f"ffn_inp{il}"] = x + found[f"attn_out{il}"]
            f = found[f"ffn_norm{il}"] = self.norm(x, f"{block}.ffn_norm.weight")
            gate, up = (f @ w[f"{block}.ffn_{part}.weight"].T for part in ("gate", "up"))
            f = (gate / (1 + np.exp(-gate)) * up) @ w[f"{block}.ffn_down.weight"].T
            x = found[f"l_out{il}"] = x + f
        found["result_norm"] = self.norm(x, "output_norm.weight")
        head = "token_embd.weight" if c.tied_embeddings else "output.weight"
        return found | {"result_output": found["result_norm"] @ w[head].T}

    def norm(self, x: np.ndarray, weight: str) -> np.ndarray:
        """RMS norm of each row."""
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.config.rms_eps) * self.weights[weight]

    def rope(self, x: np.ndarray, n_head: int) -> np.ndarray:
        """Rotate pairs of each head's elements by their position."""
        half = self.config.n_rot // 2
        heads = x.reshape(len(x), n_head, -1).copy()
        angle = np.arange(len(x))[:, None, None] * self.config.rope_base ** (-np.arange(half) / half)
        if self.repaired:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:  # these pairs are those of other architectures
            first, second = slice(0, half), slice(half, 2 * half)
        a, b = heads[..., first].copy(), heads[..., second].copy()
        heads[..., first] = a * np.cos(angle) - b * np.sin(angle)
        heads[..., second] = a * np.sin(angle) + b * np.cos(angle)
        return heads.reshape(x.shape)

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Causal attention; several query heads share each head of keys and values."""
        n, c = len(q), self.config
        q = q.reshape(n, c.n_head, c.head_dim)
        k, v = (
            np.repeat(x.reshape(n, c.n_head_kv, c.head_dim), c.n_head // c.n_head_kv, axis=1) for x in (k, v)
        )
        scores = np.einsum("qhd,khd->hqk", q, k) * c.attention_scale
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)


def record_golden(folder: Path) -> Path:
    """What ``refengine golden record --all`` would write."""
    with refengine.load(MODEL, n_ctx=64, cache_type_k="f32", cache_type_v="f32") as engine:
        case.write(record(engine, Request("first", TOKENS, tensors=("*",)), model_id(MODEL)), folder)
    return folder


def check(golden: Path, *, repaired: bool) -> bool:
    """Hold the engine's tensors against a recording; whether they agree."""
    tokens = case.read(golden).tokens
    try:
        Golden(golden.parent).check(
            golden.name, Engine(MODEL, repaired=repaired).tensors(tokens), tokens=tokens
        )
    except AssertionError as difference:
        print(difference)
        return False
    print(f"{golden.name}: ok")
    return True


def main() -> int:
    """Check the recordings of the command line; without any, make one and check it before and after the repair."""
    given = [Path(arg) for arg in sys.argv[1:] if not arg.startswith("-")]
    if given:
        return 0 if all(check(each, repaired="--repaired" in sys.argv) for each in given) else 1
    with tempfile.TemporaryDirectory() as folder:
        made = record_golden(Path(folder) / "first")
        assert not check(made, repaired=False)
        assert check(made, repaired=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
