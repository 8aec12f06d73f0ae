"""Devices: one interface (``base``), two kinds: ``host`` and ``cuda``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from instrumentation.errors import BadInputError, Error

if TYPE_CHECKING:
    from instrumentation.devices.base import Device

_log = structlog.get_logger(__name__)


def open_device(
    name: str | Device = "auto", *, threads: int | None = None, schedule_seed: int | None = None
) -> Device:
    """Device of a name: ``host``, ``cuda``, ``cuda:N``; ``auto`` is ``cuda`` where a GPU can be used, else ``host``.

    An open device is returned as it is. ``threads`` and ``schedule_seed`` are the host's; with a seed no other device
    will do. Raises ``BadInputError``; ``DeviceError`` or
    ``OutOfMemoryError`` for a GPU that is there and cannot be used.
    """
    if not isinstance(name, str):
        if schedule_seed is not None:
            raise BadInputError("schedule_seed with an open device; give it to HostDevice")
        return name
    if name == "host":
        return _open_host(threads, schedule_seed)
    if schedule_seed is not None:
        raise BadInputError(f"schedule_seed is of the host device, not of {name}; use device host with it")
    if name == "auto":
        return _best_device(threads)
    kind, colon, number = name.partition(":")
    if kind != "cuda" or (colon and not (number.isascii() and number.isdigit())):
        raise BadInputError(f"device {name!r} is unknown; use auto, host, cuda or cuda:N")
    return _open_cuda(int(number or 0))


def _open_host(threads: int | None, schedule_seed: int | None = None) -> Device:
    from instrumentation.devices.host import HostDevice  # noqa: PLC0415

    return HostDevice(threads, schedule_seed=schedule_seed)


def _open_cuda(ordinal: int) -> Device:
    from instrumentation.devices.cuda import CudaDevice  # noqa: PLC0415

    return CudaDevice(ordinal)


def _best_device(threads: int | None) -> Device:
    from instrumentation.devices.cuda_driver import has_driver  # noqa: PLC0415

    if has_driver():
        try:
            return _open_cuda(0)
        except Error as error:
            _log.warning("the GPU cannot be used, using the host", reason=str(error))
    return _open_host(threads)
