"""``@kernel`` and ``@device_function``: plain Numba CUDA source with everything the audits need to know of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

from instrumentation.errors import KernelDialectError
from instrumentation.kernel.access import AccessSets, access_sets
from instrumentation.kernel.host_compile import CompiledKernel, compile_host
from instrumentation.kernel.lower_cuda import compile_ptx, cuda_function, cuda_signature
from instrumentation.kernel.lower_host import HostOptions
from instrumentation.kernel.parse import ParsedFunction, parse_function
from instrumentation.kernel.types import signature_of


class DeviceFunction:
    """A function that kernels call. One that holds a barrier or shuffle is inlined; from Python it runs as it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.parsed: ParsedFunction = parse_function(function, (DeviceFunction,))
        self.access: AccessSets = access_sets(self.parsed)
        self._cuda: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def cuda_device(self) -> Any:
        """The ``numba.cuda`` device function."""
        if self._cuda is None:
            from numba import cuda  # noqa: PLC0415

            self._cuda = cuda.jit(device=True)(cuda_function(self.function))
        return self._cuda


class Kernel:
    """A parsed kernel. ``reads`` and ``writes`` name its array parameters; ``block`` is its shape of threads."""

    def __init__(self, function: Callable[..., Any], block: tuple[int, ...], *, strict: bool) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.block = block
        self.strict = strict
        self.parsed: ParsedFunction = parse_function(function, (DeviceFunction,))
        self.name = self.parsed.name
        self.access: AccessSets = access_sets(self.parsed)
        self.signature: dict[str, Any] = signature_of(function)
        missing = [p for p in self.parsed.parameters if p not in self.signature]
        if missing:
            self.parsed.refuse(
                self.parsed.line,
                f"parameters {missing} have no type: annotate them with instrumentation.kernel.types",
            )
        self._host: dict[HostOptions, CompiledKernel] = {}

    @property
    def reads(self) -> frozenset[str]:
        """Array parameters that the kernel reads."""
        return self.access.reads

    @property
    def writes(self) -> frozenset[str]:
        """Array parameters that the kernel writes."""
        return self.access.writes

    def host(self, options: HostOptions = HostOptions()) -> CompiledKernel:  # noqa: B008
        """The compiled host form; compiled on first use, then from the disk cache."""
        if options not in self._host:
            self._host[options] = compile_host(
                self.parsed, self.access, self.signature, self.block, options, strict_floats=self.strict
            )
        return self._host[options]

    def ptx(self, compute_capability: tuple[int, int]) -> str:
        """PTX text for a compute capability, compiled without a GPU."""
        return compile_ptx(self.function, cuda_signature(self.function), compute_capability)

    def __call__(self, *_arguments: Any) -> None:
        raise KernelDialectError(f"{self.name} is a kernel: launch it on a device's stream")

    def __repr__(self) -> str:
        return f"<kernel {self.name} block={self.block}>"


def kernel(*, block: int | tuple[int, ...], strict: bool = False) -> Callable[[Callable[..., None]], Kernel]:
    """Make a kernel of a Numba CUDA function whose parameters are annotated with ``instrumentation.kernel.types``.

    ``block``: threads of a block, one to three dimensions, a compile-time constant (at most 1,024 threads).
    ``strict``: refuse float arithmetic whose bits depend on the lowering (see ``strict.py``).
    Raises ``KernelDialectError`` with file, line and reason for source outside the dialect.
    """
    shape = (block,) if isinstance(block, int) else tuple(block)
    if not 1 <= len(shape) <= 3 or any(n < 1 for n in shape) or prod(shape) > 1024:
        raise KernelDialectError(f"block {block}: one to three positive extents, at most 1024 threads together")

    def decorate(function: Callable[..., None]) -> Kernel:
        return Kernel(function, shape, strict=strict)

    return decorate


def device_function(function: Callable[..., Any]) -> DeviceFunction:
    """Make a function callable from kernels."""
    return DeviceFunction(function)
