"""The CUDA part of ``refengine doctor``: driver, devices, toolkit. Asks the driver and changes nothing."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from cli.failures import one_line
from cli.health_check import Check

if TYPE_CHECKING:
    from collections.abc import Iterator

#: what numba-cuda loads from the toolkit
LIBRARIES = ("nvvm", "nvrtc", "nvJitLink", "cudart")
_NO_DRIVER = "to use a GPU, install NVIDIA's driver for it; the host device does without"


def cuda_checks() -> Iterator[Check]:
    """Checks of driver, devices and toolkit; none of them is needed by the host device."""
    driver_version = None
    try:
        from cuda.bindings import driver  # noqa: PLC0415

        _call(driver.cuInit(0))
        driver_version = int(_call(driver.cuDriverGetVersion()))
        devices = [_describe(driver, number) for number in range(int(_call(driver.cuDeviceGetCount())))]
    except ImportError as error:
        yield Check("cuda", "driver", "missing", one_line(str(error)), _extra(None))
    except Exception as error:  # noqa: BLE001 - bindings raise types of their own, and RuntimeError
        yield Check("cuda", "driver", "missing", one_line(str(error)), _NO_DRIVER)
    else:
        yield Check(
            "cuda", "driver", "ok", f"for CUDA {driver_version // 1000}.{driver_version % 1000 // 10}"
        )
        for number, text in enumerate(devices):
            yield Check("cuda", f"cuda:{number}", "ok", text)
        if not devices:
            yield Check("cuda", "devices", "missing", "none", _NO_DRIVER)
    yield from _toolkit_checks(driver_version)


def _toolkit_checks(driver_version: int | None) -> Iterator[Check]:
    wheels = sorted(
        f"{name} {wheel.version}"
        for wheel in importlib.metadata.distributions()
        if (name := str(wheel.metadata["Name"])).startswith(("nvidia-cuda-", "nvidia-nv", "cuda-toolkit"))
    )
    if wheels:
        yield Check("cuda", "toolkit wheels", "ok", ", ".join(wheels))
    else:
        yield Check("cuda", "toolkit wheels", "missing", "none", _extra(driver_version))
    for name in LIBRARIES:
        try:
            from cuda import pathfinder  # noqa: PLC0415

            loaded = pathfinder.load_nvidia_dynamic_lib(name)
        except Exception as error:  # noqa: BLE001 - as above
            reason = one_line(str(error)) or type(error).__name__
            yield Check("cuda", name, "missing", reason.partition(". ")[0], _extra(driver_version))
        else:
            yield Check("cuda", name, "ok", str(loaded.abs_path))


def _extra(driver_version: int | None) -> str:
    # A driver runs what was built for its own major version of CUDA, or for an older one.
    extra = "cu12" if driver_version is not None and driver_version < 13000 else "cu13"
    return f"pip install 'refengine[{extra}]'"


def _call(result: Any) -> Any:
    """Value of a driver call. Raises ``RuntimeError`` with the driver's own name of the error."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"the driver says {getattr(error, 'name', error)}")
    return values[0] if values else None


def _describe(driver: Any, number: int) -> str:
    device = _call(driver.cuDeviceGet(number))
    name = bytes(_call(driver.cuDeviceGetName(256, device))).split(b"\0")[0].decode("utf-8", "replace")
    kinds = driver.CUdevice_attribute
    major, minor, multiprocessors = (
        _call(driver.cuDeviceGetAttribute(kind, device))
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )
    )
    total = _call(driver.cuDeviceTotalMem(device)) / 2**30
    return f"{name}, compute capability {major}.{minor}, {multiprocessors} multiprocessors, {total:.1f} GiB"
