"""qwen3 (dense): the llama block with RMS norms over each query and key head, RoPE over halves.

Both differences are in ``ModelConfig`` (``qk_norm``, ``rope_pairing``), so the graph is llama's.
"""

from __future__ import annotations

from refengine.architectures.llama import build

__all__ = ["build"]
