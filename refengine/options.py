"""Options of the engine: every parameter of ``refengine.load``, checked by name."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from instrumentation.devices.host_schedule import check_seed
from instrumentation.devices.launch import MAX_GRID_YZ
from instrumentation.errors import BadInputError
from instrumentation.globs import Globs
from instrumentation.levels import Level
from instrumentation.reservation import check_nbytes
from refengine.architectures import can_draft
from refengine.config import MAX_CONTEXT
from refengine.context_plan import MAX_OUTPUTS, ContextPlan, ContextSettings
from refengine.errors import UnsupportedModelError
from refengine.kernels.kv_types import PAGE, check_cache_type, check_head_dim
from refengine.speculative import DraftSettings

if TYPE_CHECKING:
    from instrumentation.devices.base import Device
    from refengine.config import ModelConfig

_RANGES = {
    "n_ctx": (0, MAX_CONTEXT),
    "n_batch": (1, MAX_CONTEXT),
    # A launch has a row of blocks for each token.
    "n_ubatch": (1, MAX_GRID_YZ),
    "n_slots": (1, MAX_CONTEXT),
    # A draft is verified in one pass: its tokens and the one before them give a row of logits each.
    "draft_n_max": (1, MAX_OUTPUTS - 1),
    "draft_n_min": (0, MAX_OUTPUTS - 1),
}
GEMMS = ("kernels", "cublas")
SPEC_TYPES = ("none", "draft-mtp")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What ``refengine.load`` takes besides the path. Raises ``BadInputError`` naming the option.

    ``n_ctx`` 0 is the model's own context length. ``n_batch`` tokens at most are decoded by one call, ``n_ubatch`` by
    one pass over the weights.
    """

    #: a name, or an open device
    device: str | Device = "auto"
    check: str = "off"
    #: report the first launch that makes a NaN or an infinity, at any level
    check_numerics: bool = False
    #: kernels that level ``trap`` checks, and buffers whose bytes it has states of: patterns with commas between
    trap_kernels: str = "*"
    trap_buffers: str = "*"
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
    #: what computes products of many rows, those of prompts: this project's kernels, or NVIDIA's library. With cublas
    #: a row's bits depend on how many rows are computed with it
    gemm: str = "kernels"
    #: threads of the host device; all cores unless given
    threads: int | None = None
    #: the host device runs what is queued in the random order of this seed, which must not change a bit
    schedule_seed: int | None = None

    def __post_init__(self) -> None:
        level = Level.parse(self.check)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise BadInputError(f"{name} is {value!r}; give a whole number from {low} to {high}")
        self._check_kinds()
        for globs in self.traps:
            if not globs.all and level < Level.TRAP:
                raise BadInputError(f"{globs} at check level {level}; only level trap has checked kernels")
        if self.device_memory_limit is not None:
            check_nbytes(self.device_memory_limit, "device_memory_limit")
        for name in ("cache_type_k", "cache_type_v"):
            check_cache_type(name, getattr(self, name))
        if self.fast:
            raise BadInputError("fast=True is not built yet; leave it at its default")
        if self.gemm not in GEMMS:
            raise BadInputError(f"gemm {self.gemm!r} is unknown; use one of {', '.join(GEMMS)}")
        if self.gemm == "cublas" and self.device == "host":
            raise BadInputError("gemm cublas: device host has no cuBLAS; use device cuda, or gemm kernels")
        if self.gemm == "cublas" and level >= Level.TRAP:
            raise BadInputError(
                f"gemm cublas with check level {self.check}: nobody sees what a library's kernels access; use audit, "
                "or gemm kernels"
            )
        if self.schedule_seed is not None:
            check_seed(self.schedule_seed)
        self._check_drafts()

    def _check_drafts(self) -> None:
        if self.spec_type not in SPEC_TYPES:
            raise BadInputError(
                f"spec_type {self.spec_type!r} is unknown; use one of {', '.join(SPEC_TYPES)}"
            )
        if self.draft_n_min > self.draft_n_max:
            raise BadInputError(
                f"draft_n_min is {self.draft_n_min}; give at most draft_n_max, which is {self.draft_n_max}"
            )
        p_min = self.draft_p_min
        if not isinstance(p_min, int | float) or isinstance(p_min, bool) or not 0.0 <= p_min <= 1.0:
            raise BadInputError(f"draft_p_min is {p_min!r}; give a probability from 0 to 1")

    def _check_kinds(self) -> None:
        if not isinstance(self.device, str) and not hasattr(self.device, "create_stream"):
            raise BadInputError(f"device is {self.device!r}; give text, or an open device")
        for field in fields(self):
            kind = {"str": str, "bool": bool}.get(str(field.type))
            value = getattr(self, field.name)
            if kind is not None and not isinstance(value, kind):
                wanted = "text" if kind is str else "True or False"
                raise BadInputError(f"{field.name} is {value!r}; give {wanted}")

    @property
    def traps(self) -> tuple[Globs, Globs]:
        """Kernels that level ``trap`` checks, and buffers that get shadows."""
        return Globs(self.trap_kernels, "trap_kernels"), Globs(self.trap_buffers, "trap_buffers")

    @property
    def drafts(self) -> DraftSettings | None:
        """How drafts are made; None without them."""
        if self.spec_type == "none":
            return None
        return DraftSettings(self.n_draft, self.draft_n_min, float(self.draft_p_min))

    @property
    def n_draft(self) -> int:
        """Most drafts that are verified together: ``draft_n_max``, or what a pass can take behind their token.

        The last tokens of a prompt are as many and stay together, too: with several slots one token more fits a batch,
        so that they go beside a request that generates.
        """
        if self.spec_type == "none":
            return 0
        return max(0, min(self.draft_n_max, self.n_batch - min(self.n_slots, 2), self.n_ubatch - 1))

    def context_settings(self, config: ModelConfig) -> ContextSettings:
        """Sizes of the target context for a model."""
        n_ctx = self.n_ctx or config.n_ctx_train
        if n_ctx > config.n_ctx_train:
            raise BadInputError(f"n_ctx is {n_ctx}; this model was trained for at most {config.n_ctx_train}")
        if self.n_slots > n_ctx:
            raise BadInputError(
                f"n_slots is {self.n_slots}; give at most as many as positions, n_ctx {n_ctx}"
            )
        n_cells = 0
        if not self.kv_unified:
            n_ctx //= self.n_slots
            n_cells = self.n_slots * -(-n_ctx // PAGE) * PAGE
        cache_type_k = check_cache_type("cache_type_k", self.cache_type_k)
        cache_type_v = check_cache_type("cache_type_v", self.cache_type_v)
        check_head_dim("cache_type_k", cache_type_k, config.head_dim)
        check_head_dim("cache_type_v", cache_type_v, config.head_dim)
        return ContextSettings(
            n_ctx=n_ctx,
            n_batch=self.n_batch,
            n_ubatch=min(self.n_ubatch, self.n_batch),
            n_sequences=self.n_slots,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            capture=self.cuda_graphs,
            n_cells=n_cells,
            n_rs_seq=self.n_draft if config.hybrid is not None else 0,
            hands_over=self.spec_type != "none",
            worst_case_reserve=self.worst_case_reserve,
            library=self.gemm == "cublas",
        )

    def context_plans(
        self, config: ModelConfig, *, fewest_launches: bool = False, chooses: bool = False
    ) -> list[ContextPlan]:
        """The target context, and the draft context if there is one. Raises ``UnsupportedModelError``.

        ``fewest_launches``: for a device on which a launch costs more than arithmetic. ``chooses``: for one that is
        behind a bus.
        """
        target = replace(self.context_settings(config), fewest_launches=fewest_launches, chooses=chooses)
        plans = [ContextPlan(config, target)]
        if self.spec_type == "none":
            return plans
        if not can_draft(config):
            raise UnsupportedModelError(
                f"spec_type {self.spec_type}: this model ({config.architecture}) has no MTP head; use spec_type none"
            )
        # A sequence may be a token ahead of the target's, and so hold one more page.
        draft = replace(
            target,
            n_batch=target.n_batch + target.n_sequences,
            n_cells=(target.n_pages + target.n_sequences) * PAGE,
            n_rs_seq=0,
            hands_over=False,
        )
        return [*plans, ContextPlan(config, draft, "draft")]
