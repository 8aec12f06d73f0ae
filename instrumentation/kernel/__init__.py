"""Numba CUDA kernels with one source and several lowerings."""

from instrumentation.kernel.decorator import DeviceFunction, Kernel, device_function, kernel
from instrumentation.kernel.host_compile import compile_listeners
from instrumentation.kernel.lower_host import HostOptions

__all__ = ["DeviceFunction", "HostOptions", "Kernel", "compile_listeners", "device_function", "kernel"]
