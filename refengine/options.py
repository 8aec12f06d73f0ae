"""Options of the engine: every parameter of ``refengine.load``, checked by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from instrumentation.devices.launch import MAX_GRID_YZ
from instrumentation.errors import BadInputError
from instrumentation.levels import Level
from instrumentation.reservation import check_nbytes
from refengine.config import MAX_CONTEXT
from refengine.context import ContextSettings
from refengine.kernels.attention import CACHE_DTYPES

if TYPE_CHECKING:
    from instrumentation.devices.host import HostDevice
    from refengine.config import ModelConfig
    from refengine.kernels.attention import CacheType

_RANGES = {
    "n_ctx": (0, MAX_CONTEXT),
    "n_batch": (1, MAX_CONTEXT),
    # A launch has a row of blocks for each token.
    "n_ubatch": (1, MAX_GRID_YZ),
    "n_slots": (1, MAX_CONTEXT),
    "draft_n_max": (0, MAX_CONTEXT),
    "draft_n_min": (0, MAX_CONTEXT),
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What ``refengine.load`` takes besides the path. Raises ``BadInputError`` naming the option.

    ``n_ctx`` 0 is the model's own context length. ``n_batch`` tokens at most are decoded by one call, ``n_ubatch`` by
    one pass over the weights.
    """

    #: a name, or an open device
    device: str | HostDevice = "auto"
    check: str = "off"
    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_slots: int = 1
    kv_unified: bool = True
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    spec_type: str = "none"
    draft_n_max: int = 3
    draft_n_min: int = 0
    draft_p_min: float = 0.0
    device_memory_limit: int | None = None
    cuda_graphs: bool = True
    worst_case_reserve: bool = True
    fast: bool = False
    #: threads of the host device; all cores unless given
    threads: int | None = None

    def __post_init__(self) -> None:
        if Level.parse(self.check) > Level.GUARD:
            raise BadInputError(f"check level {self.check} is not built yet; use off or guard")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise BadInputError(f"{name} is {value!r}; give a whole number from {low} to {high}")
        self._check_kinds()
        if self.device_memory_limit is not None:
            check_nbytes(self.device_memory_limit, "device_memory_limit")
        if self.cache_type_k != self.cache_type_v:
            raise BadInputError(
                f"cache types {self.cache_type_k} and {self.cache_type_v}: different types for keys and values are "
                "not built yet; give both the same"
            )
        if self.cache_type_k not in CACHE_DTYPES:
            raise BadInputError(
                f"cache type {self.cache_type_k!r} is unknown; use one of {', '.join(CACHE_DTYPES)}"
            )
        not_built = {
            "n_slots": self.n_slots != 1,
            "spec_type": self.spec_type != "none",
            "fast": self.fast,
            "kv_unified": not self.kv_unified,
        }
        for name, asked in not_built.items():
            if asked:
                raise BadInputError(
                    f"{name}={getattr(self, name)!r} is not built yet; leave it at its default"
                )

    def _check_kinds(self) -> None:
        if not isinstance(self.device, str) and not hasattr(self.device, "create_stream"):
            raise BadInputError(f"device is {self.device!r}; give text, or an open device")
        for field in fields(self):
            kind = {"str": str, "bool": bool}.get(str(field.type))
            value = getattr(self, field.name)
            if kind is not None and not isinstance(value, kind):
                wanted = "text" if kind is str else "True or False"
                raise BadInputError(f"{field.name} is {value!r}; give {wanted}")

    def context_settings(self, config: ModelConfig) -> ContextSettings:
        """Sizes of the target context for a model."""
        n_ctx = self.n_ctx or config.n_ctx_train
        if n_ctx > config.n_ctx_train:
            raise BadInputError(f"n_ctx is {n_ctx}; this model was trained for at most {config.n_ctx_train}")
        cache_type: CacheType = "f32" if self.cache_type_k == "f32" else "f16"
        return ContextSettings(
            n_ctx=n_ctx,
            n_batch=self.n_batch,
            n_ubatch=min(self.n_ubatch, self.n_batch),
            n_sequences=self.n_slots,
            cache_type=cache_type,
            capture=self.cuda_graphs,
            worst_case_reserve=self.worst_case_reserve,
        )
