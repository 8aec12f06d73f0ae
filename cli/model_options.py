"""Options that say how a model is loaded and sampled. Each is named like the parameter of the API it becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from cli import completion
from cli.command import parse_size, together
from cli.help import RareOption

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")
option = click.option


def _rare(*flags: str, **attributes: Any) -> Callable[[F], F]:
    return click.option(*flags, cls=RareOption, **attributes)


def _size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    return None if value is None else parse_size(value, "--device-memory-limit")


model_option = option(
    "-m",
    "--model",
    type=completion.MODEL,
    metavar="MODEL",
    help="GGUF file, smollm2 or default (the default).",
)
override_option = _rare(
    "--override-kv", multiple=True, metavar="KEY=TYPE:VALUE", help="Replace metadata; repeatable."
)
check_tensors_option = _rare("--check-tensors", is_flag=True, help="Refuse weights that are not finite.")

batch_options = together(
    _rare("-b", "--batch-size", "n_batch", type=int, default=2048, metavar="N",
           help="Most tokens of a decode (2048)."),
    _rare("-ub", "--ubatch-size", "n_ubatch", type=int, default=512, metavar="N", help="Most tokens of a pass (512)."),
    _rare("-ctk", "--cache-type-k", "cache_type_k", type=completion.CACHE_TYPE, default="f16", metavar="TYPE",
           help="Keys: f32, f16 (default), bf16, q8_0."),
    _rare("-ctv", "--cache-type-v", "cache_type_v", type=completion.CACHE_TYPE, default="f16", metavar="TYPE",
           help="Values: like keys."),
)  # fmt: skip
context_options = together(
    option("-c", "--ctx-size", "n_ctx", type=int, default=0, metavar="N", help="Context length; 0: the model's own."),
    batch_options,
)  # fmt: skip

gemm_option = _rare(
    "--gemm",
    type=completion.GEMM,
    default="kernels",
    metavar="NAME",
    help="Products of prompts: kernels, cublas.",
)
placement_options = together(
    option(
        "-dev",
        "--device",
        type=completion.DEVICE,
        default="auto",
        metavar="NAME",
        help="auto, host, cuda or cuda:N.",
    ),
    option("-t", "--threads", type=int, metavar="N", help="Threads of the host device; all cores."),
    gemm_option,
)
schedule_option = _rare("--schedule-seed", type=int, metavar="N", help="Host: queued work in random order.")
memory_options = together(
    option("--device-memory-limit", callback=_size, metavar="SIZE", help="Bytes, or with KiB, MiB or GiB."),
    _rare(
        "--no-cuda-graphs", "cuda_graphs", flag_value=False, default=True, help="Launch kernels one by one."
    ),
    _rare(
        "--no-worst-case-reserve",
        "worst_case_reserve",
        flag_value=False,
        default=True,
        help="Let memory grow; may run out later.",
    ),
)
numerics_option = option("--check-numerics", is_flag=True, help="Find the first NaN or infinity of a kernel.")
trap_options = together(
    _rare("--trap-kernels", default="*", metavar="GLOB", help="Kernels that level trap checks (all)."),
    _rare("--trap-buffers", default="*", metavar="GLOB", help="Buffers that get shadows there (all)."),
)
device_options = together(
    placement_options,
    option(
        "--check", type=completion.LEVEL, default="off", metavar="LEVEL", help="off, guard, audit or trap."
    ),
    trap_options,
    numerics_option,
    memory_options,
)

slot_options = together(
    option("-np", "--parallel", "n_slots", type=int, default=1, metavar="N", help="Requests that run together (1)."),
    _rare("-kvu/-no-kvu", "--kv-unified/--no-kv-unified", "kv_unified", default=True,
           help="One KV cache for all of them, or a part for each (one)."),
)  # fmt: skip

speculative_options = together(
    option("--spec-type", type=completion.SPEC_TYPE, default="none", metavar="TYPE", help="none or draft-mtp."),
    option("--spec-draft-n-max", "draft_n_max", type=int, default=3, metavar="N", help="Most tokens of a draft (3)."),
    _rare("--spec-draft-n-min", "draft_n_min", type=int, default=0, metavar="N", help="Fewest tokens of a draft (0)."),
    _rare("--spec-draft-p-min", "--draft-p-min", "draft_p_min", type=float, default=0.0, metavar="P",
           help="Least probability to draft (0)."),
)  # fmt: skip

sampling_options = together(
    option("--temp", "temperature", type=float, default=0.8, metavar="T", help="Temperature (0.8); 0: most likely."),
    option("--top-k", type=int, default=40, metavar="K", help="Keep the K likeliest (40); 0: all."),
    option("--top-p", type=float, default=0.95, metavar="P", help="Keep this much probability (0.95)."),
    option("--min-p", type=float, default=0.05, metavar="P", help="Drop below P of the likeliest (0.05)."),
    _rare("--typical", "typical_p", type=float, default=1.0, metavar="P", help="Locally typical sampling (1: off)."),
    _rare("--repeat-last-n", type=int, default=64, metavar="N", help="Tokens that penalties see (64); -1: all."),
    _rare("--repeat-penalty", type=float, default=1.0, metavar="X", help="Of tokens seen (1: off)."),
    _rare("--frequency-penalty", type=float, default=0.0, metavar="X", help="Per time seen (0: off)."),
    _rare("--presence-penalty", type=float, default=0.0, metavar="X", help="Once for being seen (0: off)."),
    option("-s", "--seed", type=int, default=-1, metavar="N", help="Reproduces a run; -1 draws one."),
)  # fmt: skip


def split(given: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Take the parameters of ``names`` out of ``given``."""
    return {name: given.pop(name) for name in sorted(names & given.keys())}
