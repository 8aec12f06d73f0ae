"""Devices: one interface (``base``), implemented by the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from instrumentation.devices.host import HostDevice


def open_device(name: str | HostDevice = "auto", *, threads: int | None = None) -> HostDevice:
    """Device of a name: ``host``, or ``auto`` for the best there is; an open device is returned as it is.

    Raises ``BadInputError``.
    """
    if not isinstance(name, str):
        return name
    if name in ("auto", "host"):
        from instrumentation.devices.host import HostDevice  # noqa: PLC0415

        return HostDevice(threads)
    if name == "cuda" or name.startswith("cuda:"):
        raise BadInputError(f"device {name}: CUDA devices are not built yet; use host")
    raise BadInputError(f"device {name!r} is unknown; use auto or host")
