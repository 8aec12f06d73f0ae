"""NVIDIA's driver through ``cuda.bindings``: one method a call, each checked."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from instrumentation.devices.cuda_driver import DriverCallError

if TYPE_CHECKING:
    from instrumentation.devices.cuda_context import CudaContext

_JIT_LOG_BYTES = 8192


class CudaDriver:
    """NVIDIA's driver through ``cuda.bindings``."""

    def __init__(self, bindings: Any) -> None:
        self.contexts: dict[int, CudaContext] = {}
        self._cuda = bindings
        self._success = bindings.CUresult.CUDA_SUCCESS
        self._thread_local = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Result of a driver call; several as a tuple."""
        error, *values = getattr(self._cuda, name)(*arguments)
        if error != self._success:
            raise DriverCallError(name, _name_of(error))
        return values[0] if len(values) == 1 else tuple(values)

    # --- devices

    def version(self) -> int:
        """See ``Driver``."""
        return int(self._call("cuDriverGetVersion"))

    def device_count(self) -> int:
        """See ``Driver``."""
        return int(self._call("cuDeviceGetCount"))

    def device_name(self, ordinal: int) -> str:
        """See ``Driver``."""
        name = self._call("cuDeviceGetName", 256, self._device(ordinal))
        return bytes(name).split(b"\0")[0].decode("utf-8", "replace")

    def compute_capability(self, ordinal: int) -> tuple[int, int]:
        """See ``Driver``."""
        kinds = self._cuda.CUdevice_attribute
        device = self._device(ordinal)
        major = self._call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = self._call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        return int(major), int(minor)

    def total_memory(self, ordinal: int) -> int:
        """See ``Driver``."""
        return int(self._call("cuDeviceTotalMem", self._device(ordinal)))

    def _device(self, ordinal: int) -> Any:
        return self._call("cuDeviceGet", ordinal)

    def retain_context(self, ordinal: int) -> Any:
        """See ``Driver``."""
        return self._call("cuDevicePrimaryCtxRetain", self._device(ordinal))

    def set_context(self, context: Any) -> None:
        """See ``Driver``."""
        self._call("cuCtxSetCurrent", context)

    def synchronize_context(self) -> None:
        """See ``Driver``."""
        self._call("cuCtxSynchronize")

    # --- memory

    def memory_info(self) -> tuple[int, int]:
        """See ``Driver``."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def allocate(self, nbytes: int) -> int:
        """See ``Driver``."""
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        """See ``Driver``."""
        self._call("cuMemFree", address)

    def allocate_pinned(self, nbytes: int) -> tuple[int, int]:
        """See ``Driver``."""
        flags = int(self._cuda.CU_MEMHOSTALLOC_PORTABLE) | int(self._cuda.CU_MEMHOSTALLOC_DEVICEMAP)
        address = int(self._call("cuMemHostAlloc", nbytes, flags))
        try:
            return address, int(self._call("cuMemHostGetDevicePointer", address, 0))
        except BaseException:
            self._call("cuMemFreeHost", address)
            raise

    def free_pinned(self, address: int) -> None:
        """See ``Driver``."""
        self._call("cuMemFreeHost", address)

    def copy_in(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """See ``Driver``."""
        (error,) = self._cuda.cuMemcpyHtoDAsync(target, source, nbytes, stream)
        if error != self._success:
            raise DriverCallError("cuMemcpyHtoDAsync", _name_of(error))

    def copy_out(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """See ``Driver``."""
        (error,) = self._cuda.cuMemcpyDtoHAsync(target, source, nbytes, stream)
        if error != self._success:
            raise DriverCallError("cuMemcpyDtoHAsync", _name_of(error))

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """See ``Driver``."""
        self._call("cuMemcpyDtoDAsync", target, source, nbytes, stream)

    def fill(self, target: int, value: int, nbytes: int, stream: Any) -> None:
        """See ``Driver``."""
        self._call("cuMemsetD8Async", target, value, nbytes, stream)

    # --- streams and events

    def create_stream(self) -> Any:
        """See ``Driver``."""
        return self._call("cuStreamCreate", int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def destroy_stream(self, stream: Any) -> None:
        """See ``Driver``."""
        self._call("cuStreamDestroy", stream)

    def synchronize_stream(self, stream: Any) -> None:
        """See ``Driver``."""
        self._call("cuStreamSynchronize", stream)

    def create_event(self) -> Any:
        """See ``Driver``."""
        return self._call("cuEventCreate", int(self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def destroy_event(self, event: Any) -> None:
        """See ``Driver``."""
        self._call("cuEventDestroy", event)

    def record(self, event: Any, stream: Any) -> None:
        """See ``Driver``."""
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: Any, event: Any) -> None:
        """See ``Driver``."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def synchronize_event(self, event: Any) -> None:
        """See ``Driver``."""
        self._call("cuEventSynchronize", event)

    # --- kernels and graphs

    def load(self, image: bytes, entry: str) -> Any:
        """See ``Driver``; a failure has the log of the driver's compiler."""
        kinds = self._cuda.CUjit_option
        # The bindings take the log's buffer as bytes, and the driver writes into it.
        log = bytes(_JIT_LOG_BYTES)
        options = [kinds.CU_JIT_ERROR_LOG_BUFFER, kinds.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        data = ctypes.create_string_buffer(image, len(image) + 1)
        address = ctypes.addressof(data)
        try:
            module = self._call("cuModuleLoadDataEx", address, len(options), options, [log, len(log)])
        except DriverCallError as error:
            text = " ".join(log.split(b"\0")[0].decode(errors="replace").split())
            raise DriverCallError(error.call, error.error, text) from None
        return self._call("cuModuleGetFunction", module, entry.encode())

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
        """See ``Driver``."""
        if early:
            self._launch_early(function, grid, block, stream, parameters)
            return
        (error,) = self._cuda.cuLaunchKernel(function, *grid, *block, 0, stream, parameters, 0)
        if error != self._success:
            raise DriverCallError("cuLaunchKernel", _name_of(error))

    def _launch_early(
        self,
        function: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        stream: Any,
        parameters: int,
    ) -> None:
        cuda = self._cuda
        attribute = cuda.CUlaunchAttribute()
        attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = 0
        config.hStream = stream
        config.attrs = [attribute]
        config.numAttrs = 1
        self._call("cuLaunchKernelEx", config, function, parameters, 0)

    def begin_capture(self, stream: Any) -> None:
        """See ``Driver``."""
        self._call("cuStreamBeginCapture", stream, self._thread_local)

    def end_capture(self, stream: Any) -> Any:
        """See ``Driver``."""
        graph = self._call("cuStreamEndCapture", stream)
        try:
            return self._call("cuGraphInstantiate", graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)

    def replay(self, graph: Any, stream: Any) -> None:
        """See ``Driver``."""
        (error,) = self._cuda.cuGraphLaunch(graph, stream)
        if error != self._success:
            raise DriverCallError("cuGraphLaunch", _name_of(error))

    def destroy_graph(self, graph: Any) -> None:
        """See ``Driver``."""
        self._call("cuGraphExecDestroy", graph)


def _name_of(error: Any) -> str:
    return str(getattr(error, "name", error))
