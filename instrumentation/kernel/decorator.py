"""``@kernel`` and ``@device_function``: plain Numba CUDA source with everything the audits need to know of it."""

from __future__ import annotations

import functools
import threading
from math import prod
from typing import TYPE_CHECKING, Any

from numba.core import types as nb

from instrumentation.errors import KernelDialectError
from instrumentation.kernel.access import AccessSets, access_sets
from instrumentation.kernel.checked.lower_cuda import compile_checked_ptx
from instrumentation.kernel.checked.states import allowed_reads
from instrumentation.kernel.cuda_entry import RowsAhead, with_entry
from instrumentation.kernel.host_compile import CompiledKernel, access_table, compile_host
from instrumentation.kernel.lower_cuda import compile_ptx, cuda_function, cuda_signature
from instrumentation.kernel.lower_host import HostOptions
from instrumentation.kernel.parse import ParsedFunction, number_type, parse_function
from instrumentation.kernel.plan import KernelPlan, plan_kernel
from instrumentation.kernel.types import signature_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from instrumentation.kernel.checked.access import AccessTable

_PLAIN = HostOptions()


class DeviceFunction:
    """A function that kernels call. One that waits or asks for its thread is inlined; Python runs it as it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.parsed: ParsedFunction = parse_function(function)
        functools.update_wrapper(self, function)
        self.function = function
        self.access: AccessSets = access_sets(self.parsed)
        self._cuda: dict[tuple[int, int] | None, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Run the Python function."""
        return self.function(*arguments)

    def cuda_device(self, compute_capability: tuple[int, int] | None = None) -> Any:
        """The ``numba.cuda`` device function: for the current device, or for one that is not here."""
        if compute_capability not in self._cuda:
            from numba import cuda  # noqa: PLC0415

            own = cuda_function(self.function, self.parsed, compute_capability)
            self._cuda[compute_capability] = cuda.jit(device=True)(own)
        return self._cuda[compute_capability]

    def __repr__(self) -> str:
        return f"<device function {self.parsed.name}>"


class Kernel:
    """A parsed kernel. ``reads`` and ``writes`` name its array parameters; ``block`` is its shape of threads."""

    def __init__(
        self,
        function: Callable[..., Any],
        block: tuple[int, ...],
        *,
        strict: bool,
        ahead: RowsAhead | None = None,
        resident: int | None = None,
        checked_resident: int | None = None,
        constants: Sequence[str] = (),
    ) -> None:
        self.signature: dict[str, Any] = _checked_signature(function)
        ranks = {name: kind.ndim for name, kind in self.signature.items() if isinstance(kind, nb.Array)}
        self.parsed: ParsedFunction = parse_function(function, ranks)
        functools.update_wrapper(self, function)
        self.function = function
        self.block = block
        self.strict = strict
        #: what a GPU fetches before the kernel's predecessor is done
        self.ahead = ahead
        #: blocks that a GPU's multiprocessor shall hold at a time
        self.resident = resident
        self.checked_resident = checked_resident
        self.name = self.parsed.name
        #: arrays that are written once, before any launch: what is said of them changes no result
        self.constants: frozenset[str] = frozenset(constants) | (
            ahead.names if ahead is not None else frozenset()
        )
        missing = [p for p in self.parsed.parameters if p not in self.signature]
        if missing:
            self.parsed.refuse(
                self.parsed.line,
                f"parameters {missing} have no type: annotate them with instrumentation.kernel.types",
            )
        self.access: AccessSets = access_sets(self.parsed)
        self.plan: KernelPlan = plan_kernel(self.parsed, self.access, self.signature, block)
        self._host: dict[HostOptions, CompiledKernel] = {}
        self._lock = threading.Lock()

    @property
    def reads(self) -> frozenset[str]:
        """Array parameters that the kernel reads."""
        return self.access.reads

    @property
    def writes(self) -> frozenset[str]:
        """Array parameters that the kernel writes."""
        return self.access.writes

    def host(self, options: HostOptions = _PLAIN) -> CompiledKernel:
        """The compiled host form; compiled on first use, then from the disk cache."""
        with self._lock:
            if options not in self._host:
                self._host[options] = compile_host(self.plan, options, strict_floats=self.strict)
            return self._host[options]

    @functools.cached_property
    def access_table(self) -> AccessTable:
        """The accesses of the kernel's checked forms, by the numbers that their reports give."""
        return access_table(self.plan)

    @functools.cached_property
    def unread_states(self) -> frozenset[str]:
        """Arrays that are only read, and whose every load says that what it reads may be unwritten."""
        return allowed_reads(self.parsed, self.reads - self.writes)

    def ptx(self, compute_capability: tuple[int, int], *, checked: bool = False) -> str:
        """PTX text for a compute capability, compiled without a GPU; ``checked``: of the checked form.

        The checked form fetches nothing ahead, and needs more registers.
        """
        if checked:
            known = self.constants | self.unread_states
            text = compile_checked_ptx(self.plan, self.access_table, compute_capability, known)
            return with_entry(
                text, self.signature, self.block, compute_capability, resident=self.checked_resident
            )
        plain = compile_ptx(self.function, self.parsed, cuda_signature(self.signature), compute_capability)
        return with_entry(
            plain,
            self.signature,
            self.block,
            compute_capability,
            ahead=self.ahead,
            resident=self.resident,
        )

    def __call__(self, *_arguments: Any) -> None:
        """Refuse: a kernel runs on a device."""
        raise KernelDialectError(f"{self.name} is a kernel: launch it on a device's stream")

    def __repr__(self) -> str:
        return f"<kernel {self.name} block={self.block}>"


def _checked_signature(function: Any) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}: {function.__name__}" if code else repr(function)
    try:
        signature = signature_of(function)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise KernelDialectError(f"{where}: its annotations cannot be read: {error}") from error
    for name, kind in signature.items():
        is_array = isinstance(kind, nb.Array)
        if number_type(kind.dtype if is_array else kind) is None or (is_array and kind.layout != "C"):
            raise KernelDialectError(
                f"{where}: parameter {name!r} has type {kind}: numbers and C-contiguous arrays of them, as in "
                "instrumentation.kernel.types"
            )
    return signature


def kernel(
    *,
    block: int | tuple[int, ...],
    strict: bool = False,
    ahead: RowsAhead | None = None,
    resident: int | None = None,
    checked_resident: int | None = None,
    constants: Sequence[str] = (),
) -> Callable[[Callable[..., None]], Kernel]:
    """Make a kernel of a Numba CUDA function whose parameters are annotated with ``instrumentation.kernel.types``.

    ``block``: threads of a block, one to three dimensions, a compile-time constant (at most 1,024 threads).
    ``strict``: refuse float arithmetic whose bits depend on the lowering (see ``strict.py``).
    ``ahead``: rows of constant matrices that a GPU may fetch early, which changes no result.
    ``resident``: blocks that a GPU's multiprocessor shall hold at a time, for which its assembler leaves registers;
    ``checked_resident``: of its checked form.
    ``constants``: arrays that are written once, such as weights; a checked form for CUDA is made for that, and right
    for others too. Those of ``ahead`` are among them.
    Raises ``KernelDialectError`` with file, line and reason for source outside the dialect.
    """
    shape = (block,) if isinstance(block, int) else tuple(block)
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in shape)
    if not 1 <= len(shape) <= 3 or not whole or prod(shape) > 1024 or (len(shape) == 3 and shape[2] > 64):
        raise KernelDialectError(
            f"block {block}: one to three positive extents, at most 1024 threads together and 64 along z"
        )

    def decorate(function: Callable[..., None]) -> Kernel:
        return Kernel(
            function,
            shape,
            strict=strict,
            ahead=ahead,
            resident=resident,
            checked_resident=checked_resident,
            constants=constants,
        )

    return decorate


def device_function(function: Callable[..., Any]) -> DeviceFunction:
    """Make a function callable from kernels."""
    return DeviceFunction(function)
