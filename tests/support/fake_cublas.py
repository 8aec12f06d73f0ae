"""cuBLAS over the fake driver: real products, and its documented rules of handles, streams and workspaces."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from fake_cuda import CONTEXT, FakeCall, FakeDriver, fake_device

from instrumentation.devices.host_blas import NumpyBlas
from instrumentation.devices.host_memory import bytes_at
from instrumentation.handles import Library, LibraryCallError

if TYPE_CHECKING:
    from collections.abc import Callable

    from instrumentation.devices.cuda import CudaDevice

#: device memory that a handle takes beside its workspace
HANDLE_NBYTES = 4 << 20
_NAMES = {
    "create": "cublasCreate", "destroy": "cublasDestroy", "set_stream": "cublasSetStream",
    "stream_of": "cublasGetStream", "set_workspace": "cublasSetWorkspace", "sgemm": "cublasSgemm",
}  # fmt: skip


def blas_device(**settings: Any) -> CudaDevice:
    """A CUDA device on a driver of its own, with a library of its own."""
    device = fake_device(**settings)
    device.library = Library(FakeCublas(device.context.driver))
    return device


class FakeCublas(NumpyBlas):
    """``fail`` makes a call fail, ``stray`` makes products write so many floats behind their result."""

    name = "cublas"

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__()
        self.driver = driver
        self.calls: Counter[str] = Counter()
        self.stray = 0
        self._failures: dict[tuple[str, int], str] = {}

    def fail(self, call: str, status: str, nth: int = 1) -> None:
        """Let the ``nth`` call of one of the interface's names from here on fail."""
        self._failures[call, self.calls[call] + nth] = status

    def _enter(self, call: str) -> None:
        self.calls[call] += 1
        status = self._failures.pop((call, self.calls[call]), None)
        if status is None and self.driver.lost is not None:
            status = "EXECUTION_FAILED"
        if status is None and getattr(self.driver._current, "context", None) != CONTEXT:
            status = "NOT_INITIALIZED"
        if status is not None:
            raise self._error(call, status)

    def _error(self, call: str, status: str) -> LibraryCallError:
        return LibraryCallError(
            _NAMES[call], f"CUBLAS_STATUS_{status}", out_of_memory=status == "ALLOC_FAILED"
        )

    def _state(self, call: str, handle: int) -> Any:
        self._enter(call)
        try:
            return super()._state(call, handle)
        except LibraryCallError as error:
            raise self._error(call, error.status) from None

    def create(self) -> int:
        self._enter("create")
        self.driver.hidden += HANDLE_NBYTES
        return super().create()

    def destroy(self, handle: int) -> None:
        super().destroy(handle)
        self.driver.synchronize_context()
        self.driver.hidden -= HANDLE_NBYTES

    def sgemm(self, handle: int, *arguments: Any) -> None:
        state = self.states.get(handle)
        self._workspace = None if state is None else state.workspace
        self._result = arguments[-2], arguments[-1], arguments[2], arguments[3]
        try:
            super().sgemm(handle, *arguments)
        except LibraryCallError as error:
            status = error.status.removeprefix("CUBLAS_STATUS_")
            raise self._error("sgemm", status) from None

    def _enqueue(self, stream: Any, work: Callable[[], None]) -> None:
        workspace, stray, (c, ldc, m, n) = self._workspace, self.stray, self._result

        def run() -> None:
            if workspace is not None:
                bytes_at(workspace[0], 1024)[:] = 0x5A
            work()
            if stray:
                bytes_at(c + 4 * ((n - 1) * ldc + m), 4 * stray)[:] = 0x5A

        if stream not in self.driver.streams:
            raise self._error("sgemm", "EXECUTION_FAILED")
        if stream.capture is not None:
            stream.capture.append(FakeCall(run))
        else:
            self.driver._queue(stream, run)
