"""Numba CUDA kernels with one source and several lowerings."""

from instrumentation.kernel.cuda_entry import RowsAhead
from instrumentation.kernel.decorator import DeviceFunction, Kernel, device_function, kernel
from instrumentation.kernel.host_compile import compile_listeners
from instrumentation.kernel.lower_host import HostOptions

__all__ = [
    "DeviceFunction",
    "HostOptions",
    "Kernel",
    "RowsAhead",
    "compile_listeners",
    "device_function",
    "kernel",
]
