"""The fake CUDA driver, but checked kernels run by what they are compiled to for a GPU: ``ptx_machine``."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

import ptx_machine
from fake_cuda import FakeDriver, FakeFunction, FakeLaunch, fake_image

from instrumentation.devices.cuda import CudaDevice
from instrumentation.devices.cuda_context import parameter_sizes

if TYPE_CHECKING:
    from instrumentation.kernel import Kernel

CAPABILITY = (9, 0)


@cache
def checked_ptx(kernel: Kernel) -> str:
    """What a kernel's checked form is compiled to."""
    return kernel.ptx(CAPABILITY, checked=True)


class PtxLaunch:
    """A checked kernel with its parameters as the GPU takes them."""

    def __init__(
        self, function: FakeFunction, grid: tuple[int, int, int], block: tuple[int, int, int], parameters: int
    ) -> None:
        self.name = function.name
        self.kernel = function.kernel
        self.grid, self.block = grid, block
        sizes = parameter_sizes(function.kernel, checked=True)
        table = (ctypes.c_int64 * len(sizes)).from_address(parameters)
        self.parameters = [
            int.from_bytes(ctypes.string_at(at, size), "little")
            for at, size in zip(table, sizes, strict=True)
        ]

    def run(self, blocks: list[tuple[int, int]]) -> None:
        """Run it on memory of these addresses and sizes."""
        ptx_machine.run(
            checked_ptx(self.kernel), self.grid, self.block, self.parameters, ptx_machine.Memory(blocks)
        )


class PtxDriver(FakeDriver):
    """A driver on which checked kernels are PTX."""

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        stream: Any,
        parameters: int,
        *,
        early: bool = False,
    ) -> None:
        """Queue a launch."""
        if not function.checked:
            super().launch(function, grid, block, stream, parameters, early=early)
            return
        self._enter("launch")
        launch = PtxLaunch(function, grid, block, parameters)
        if stream.capture is not None:
            stream.capture.append(launch)
        else:
            self._queue(stream, lambda: self._execute([launch]))  # type: ignore[list-item]

    def _execute_launches(self, launches: list[Any]) -> None:
        for launch in launches:
            if isinstance(launch, FakeLaunch):
                super()._execute_launches([launch])
            else:
                held = [*self.memory.items(), *self.pinned.items()]
                launch.run([(address, block.nbytes) for address, block in held])


def ptx_device(**settings: Any) -> CudaDevice:
    """A CUDA device on a driver of its own."""
    return CudaDevice(driver=PtxDriver(**settings), compile_kernel=fake_image)
