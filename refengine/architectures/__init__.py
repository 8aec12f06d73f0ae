"""One file per architecture; a new one is a file and an entry here and in ``refengine.config.ARCHITECTURES``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from refengine.architectures import llama, qwen3, qwen35, qwen35_mtp

if TYPE_CHECKING:
    from refengine.config import ModelConfig
    from refengine.graph import BatchShape, ContextShape, Graph

Builder = Callable[["ModelConfig", "ContextShape", "BatchShape"], "Graph"]

BUILDERS: dict[str, Builder] = {
    "llama": llama.build,
    "qwen3": qwen3.build,
    "qwen35": qwen35.build,
    "qwen35moe": qwen35.build,
}
#: graphs of MTP blocks, which draft what their models then verify
DRAFT_BUILDERS: dict[str, Builder] = {
    "qwen35": qwen35_mtp.build,
    "qwen35moe": qwen35_mtp.build,
}


def can_draft(config: ModelConfig) -> bool:
    """Whether a model has an MTP block."""
    return config.architecture in DRAFT_BUILDERS and config.hybrid is not None and config.hybrid.n_nextn > 0
