"""A device at level trap, with an arena: where faults are planted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from instrumentation.allocator import Allocator
from instrumentation.devices.host import HostDevice
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner

if TYPE_CHECKING:
    from instrumentation.findings import Finding
    from instrumentation.view import View


TARGET = Owner("target")


class World:
    """A device at level trap, the host unless given."""

    def __init__(
        self, threads: int = 1, level: Level = Level.TRAP, device: Any = None, **options: Any
    ) -> None:
        self.findings = FindingLog()
        self.device: Any = HostDevice(threads) if device is None else device
        self.allocator = Allocator(self.device, level=level, findings=self.findings, **options)
        self.device.watch(self.allocator)
        self.stream = self.device.create_stream(owner=TARGET, name="target.0")
        self.arena = self.allocator.reserve_arena(1 << 18, owner=TARGET, name="arena").unwrap()

    def array(self, name: str, value: Any, arena: Any = None) -> View:
        """A view of what ``planted_faults`` says of an array."""
        written = None
        if isinstance(value, tuple):
            value, written = value if isinstance(value[0], np.ndarray) else (np.empty(value[1], value[0]), 0)
        nbytes = max(1, value.nbytes)
        buffer = (arena or self.arena).reserve(nbytes, owner=TARGET, name=name).unwrap()
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)[:written]
        if raw.nbytes:
            self.stream.copy_in(buffer.view("uint8", raw.nbytes), raw)
        view: View = buffer.view(value.dtype, value.shape)
        return view

    def bind(self, arguments: dict[str, Any]) -> dict[str, Any]:
        arrays = (np.ndarray, tuple)
        return {
            name: self.array(name, value) if isinstance(value, arrays) else value
            for name, value in arguments.items()
        }

    def launch(self, kernel: Any, grid: Any, arguments: dict[str, Any]) -> tuple[Finding, ...]:
        """Finish a launch; what was found, in the order of the source."""
        self.stream.launch(kernel, grid, self.bind(arguments))
        self.stream.synchronize()
        return self.findings.list()

    def read(self, view: View) -> Any:
        array = np.empty(view.shape, view.dtype)
        self.stream.copy_out(array, view)
        self.stream.synchronize()
        return array
