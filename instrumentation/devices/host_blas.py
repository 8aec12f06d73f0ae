"""A library of products with handles, for programs that are tried without a GPU: NumPy behind cuBLAS's rules.

Work goes on the stream that the handle has, whoever calls; a new stream takes the workspace away; a stream that is gone
is an error. How work is put on a stream is the device's part.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from instrumentation.devices.host_memory import bytes_at
from instrumentation.devices.registry import handle_value
from instrumentation.handles import LibraryCallError

if TYPE_CHECKING:
    from collections.abc import Callable

    from instrumentation.devices.host import HostDevice

_handles = itertools.count(0x5000_0000, 0x100)


class _State:
    """What a handle has."""

    def __init__(self) -> None:
        self.stream: Any = None
        #: address and bytes; None: the library's own
        self.workspace: tuple[int, int] | None = None


class NumpyBlas(ABC):
    """See the module."""

    name = "numpy"
    least_workspace = 16 << 10
    workspace_alignment = 256

    def __init__(self) -> None:
        self.states: dict[int, _State] = {}

    @abstractmethod
    def _enqueue(self, stream: Any, work: Callable[[], None]) -> None:
        """Put work on a stream; raises ``LibraryCallError`` when there is none."""

    def _state(self, call: str, handle: int) -> _State:
        state = self.states.get(handle)
        if state is None:
            raise LibraryCallError(call, "NOT_INITIALIZED")
        return state

    def create(self) -> int:
        """See ``LibraryCalls``."""
        handle = next(_handles)
        self.states[handle] = _State()
        return handle

    def destroy(self, handle: int) -> None:
        """See ``LibraryCalls``."""
        self._state("destroy", handle)
        del self.states[handle]

    def set_stream(self, handle: int, stream: Any) -> None:
        """See ``LibraryCalls``."""
        state = self._state("set_stream", handle)
        state.stream, state.workspace = stream, None

    def stream_of(self, handle: int) -> int:
        """See ``LibraryCalls``."""
        stream = self._state("stream_of", handle).stream
        return 0 if stream is None else handle_value(stream)

    def set_workspace(self, handle: int, address: int, nbytes: int) -> None:
        """See ``LibraryCalls``."""
        state = self._state("set_workspace", handle)
        if address % self.workspace_alignment:
            raise LibraryCallError("set_workspace", "INVALID_VALUE")
        state.workspace = address, nbytes

    def sgemm(
        self,
        handle: int,
        trans_a: bool,
        trans_b: bool,
        m: int,
        n: int,
        k: int,
        alpha: float,
        a: int,
        lda: int,
        b: int,
        ldb: int,
        beta: float,
        c: int,
        ldc: int,
    ) -> None:
        """See ``BlasCalls``."""
        state = self._state("sgemm", handle)
        if state.workspace is not None and state.workspace[1] < self.least_workspace:
            raise LibraryCallError("sgemm", "ALLOC_FAILED", out_of_memory=True)

        def run() -> None:
            left = _columns(a, lda, m, k, transposed=trans_a)
            right = _columns(b, ldb, k, n, transposed=trans_b)
            result = _columns(c, ldc, m, n)
            total = np.float32(alpha) * (left @ right)
            result[...] = total if beta == 0 else total + np.float32(beta) * result

        self._enqueue(state.stream, run)


def _columns(
    address: int, ld: int, rows: int, columns: int, *, transposed: bool = False
) -> npt.NDArray[np.float32]:
    """A matrix [rows, columns], whose columns, or rows if it is transposed, lie ``ld`` floats behind each other."""
    outer, inner = (rows, columns) if transposed else (columns, rows)
    end = (outer - 1) * ld + inner
    flat = bytes_at(address, 4 * end).view(np.float32)
    lines = np.lib.stride_tricks.as_strided(flat, (outer, inner), (4 * ld, 4))
    return lines if transposed else lines.T


class HostBlas(NumpyBlas):
    """Products on the streams of a host device."""

    def __init__(self, device: HostDevice) -> None:
        super().__init__()
        self._device = device

    def _enqueue(self, stream: Any, work: Callable[[], None]) -> None:
        for own in self._device.streams:
            if stream is not None and own.handle == stream:
                own.enqueue_call(work)
                return
        raise LibraryCallError("sgemm", "EXECUTION_FAILED")
