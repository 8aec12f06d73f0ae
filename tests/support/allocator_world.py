"""An allocator on fake memory with one arena, for the tests of everything that the allocator hands out."""

from __future__ import annotations

import pytest
from fake_memory import FakeMemory

from instrumentation.allocator import Allocator
from instrumentation.findings import FindingLog, RefusedError
from instrumentation.levels import Level
from instrumentation.ownership import Owner

TARGET = Owner("target")
DRAFT = Owner("draft")
MODEL = Owner("model")

LEVELS = [Level.OFF, Level.GUARD]


class World:
    """An allocator on fake memory with one arena, and what it found."""

    def __init__(self, level=Level.GUARD, arena_bytes=1 << 16, **options):
        self.memory = FakeMemory(options.pop("total", 1 << 22), alignment=options.pop("alignment", 256))
        self.log = FindingLog()
        self.allocator = Allocator(self.memory, level=level, findings=self.log, **options)
        self.arena = self.allocator.reserve_arena(arena_bytes, owner=TARGET, name="arena").unwrap()

    def buffer(self, nbytes=1000, owner=TARGET, name="x"):
        return self.arena.reserve(nbytes, owner=owner, name=name).unwrap()

    @property
    def codes(self):
        return [finding.code for finding in self.log]


def refusal(call, *args, **kwargs):
    with pytest.raises(RefusedError) as raised:
        call(*args, **kwargs)
    return raised.value.finding


def overwrite(world, address, count, value=0x41):
    world.memory.write(address, bytes([value]) * count)
