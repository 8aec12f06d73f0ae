"""Reports as people read them. ``REFENGINE_UPDATE_GOLDEN=1 pytest`` of this file writes the texts anew."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_memory import FakeMemory
from numba import cuda, float32

from instrumentation.allocator import Allocator, BufferRequest
from instrumentation.devices.launch import bind
from instrumentation.devices.trap import Run, findings
from instrumentation.errors import FindingError
from instrumentation.findings import BufferFacts, CallSite, Finding, FindingLog, Frame, MemoryWindow
from instrumentation.kernel import device_function, kernel
from instrumentation.kernel.checked.report import (
    OUTSIDE,
    RECORD_WORDS,
    REPORT_WORDS,
    UNWRITTEN,
    USED_AFTER_FREE,
    Record,
)
from instrumentation.kernel.types import f32_1d, f32_2d, i32
from instrumentation.levels import Level
from instrumentation.ownership import Owner
from instrumentation.reports.text import describe_place, render

GOLDEN = Path(__file__).parents[1] / "data" / "reports"
TARGET, DRAFT = Owner("target"), Owner("draft")


def normalise(text):
    """Keep this file's frames only, without line numbers: what calls it differs from machine to machine."""
    lines = []
    ours = True
    text = re.sub(r"\([^() ]*test_report_text\.py:\d+:", "(test_report_text.py:N:", text)
    for line in text.splitlines():
        frame = re.fullmatch(r"  (.*):\d+ in (.*)", line)
        if frame:
            ours = frame[1].endswith("test_report_text.py")
            if ours:
                lines.append(f"  test_report_text.py:N in {frame[2]}")
        elif not line.startswith("      ") or ours or "^" in line:
            lines.append(line)
    return "\n".join(lines) + "\n"


def check(name, text):
    path = GOLDEN / f"{name}.txt"
    seen = normalise(text)
    if os.environ.get("REFENGINE_UPDATE_GOLDEN"):
        path.write_text(seen, "utf-8", newline="\n")
    assert seen == path.read_text("utf-8")


class World:
    def __init__(self):
        self.memory = FakeMemory()
        self.log = FindingLog()
        self.allocator = Allocator(self.memory, level=Level.GUARD, findings=self.log)
        self.arena = self.allocator.reserve_arena(1 << 14, owner=TARGET, name="kv").unwrap()

    def buffer(self, nbytes, owner, name):
        return self.arena.reserve(nbytes, owner=owner, name=name).unwrap()


@pytest.fixture
def world():
    return World()


def only(log):
    (finding,) = log
    return render(finding)


def test_overflow_right_by_four_bytes(world):
    buffer = world.buffer(1000, TARGET, "kv.k.0")
    world.buffer(1000, DRAFT, "kv.v.0")
    world.memory.write(buffer.address + 1000, b"ABCD")
    buffer.check_canaries()
    check("mem002_right", only(world.log))


def test_underflow_left_by_one_byte(world):
    buffer = world.buffer(1000, TARGET, "kv.k.0")
    world.memory.write(buffer.address - 1, b"\0")
    buffer.check_canaries()
    check("mem001_left", only(world.log))


def test_overflow_into_the_neighbour_after_a_launch(world):
    first = world.buffer(512, TARGET, "compute.ffn_up")
    world.buffer(512, DRAFT, "compute.h_nextn")
    world.memory.write(first.address + 512, b"\x3f" * 320)
    world.allocator.find_damage(
        first.address + 512, kernel="swiglu", launch=4711, argument="y", stream="target.0", actor="target"
    )
    check("mem002_neighbour", only(world.log))


def test_write_after_free(world):
    buffer = world.buffer(1000, DRAFT, "draft.h_nextn")
    buffer.free()
    world.memory.write(buffer.address + 12, b"\0\0\x80\x3f")
    world.allocator.check_integrity()
    check("mem003_after_free", only(world.log))


def test_double_free(world):
    buffer = world.buffer(1000, TARGET, "kv.k.0")
    buffer.free()
    with pytest.raises(FindingError) as raised:
        buffer.free()
    check("mem005_double_free", str(raised.value))
    assert str(raised.value) == only(world.log)


def test_use_of_a_dormant_buffer(world):
    reserve = world.arena.reserve_overlay
    decode = reserve([BufferRequest(1000, TARGET, "decode.q")], owner=TARGET, name="decode").unwrap()
    prefill = reserve([BufferRequest(9000, TARGET, "prefill.q")], owner=TARGET, name="prefill").unwrap()
    prefill.activate()
    with pytest.raises(FindingError) as raised:
        decode.buffers[0].view("f4", (250,), name="q").check_live(
            kernel="rope", argument="q", launch=3, stream="target.0", actor="target"
        )
    check("mem004_dormant", str(raised.value))


def test_unchecked_reservation(world):
    world.arena.reserve(4096, owner=DRAFT, name="kv.k.0")
    check("res001_dropped", only(world.log))


def test_leak(world):
    world.buffer(1000, DRAFT, "kv.v.3")
    world.allocator.close()
    check("mem006_leak", only(world.log))


def test_free_of_a_pinned_buffer(world):
    buffer = world.buffer(1000, TARGET, "workspace")
    buffer.pin("graph decode n=4")
    with pytest.raises(FindingError) as raised:
        buffer.free()
    check("gra001_pinned", str(raised.value))


def test_lease_by_a_stranger(world):
    with pytest.raises(FindingError) as raised:
        world.buffer(1000, TARGET, "kv.k.0").lend(to=Owner("model"), mode="read", by=DRAFT)
    check("own001_lend", str(raised.value))


@device_function
def element(values, i):
    return values[i]


@kernel(block=32)
def blend(x: f32_1d, y: f32_2d, n: i32) -> None:
    tile = cuda.shared.array(32, float32)
    i = cuda.grid(1)
    tile[cuda.threadIdx.x] = element(x, i) + x[i - 1]
    y[1, i] = tile[i]


class TestKernelAccesses:
    """Records as a device writes them, over memory whose addresses are the same everywhere."""

    def report(self, world, name, text, how, *records, chain=0, freed=False):
        """Check the report of records of (kind, count, block, thread, indices, extents) at one site."""
        x = world.buffer(400, TARGET, "compute.x").view("float32", 100)
        y = world.buffer(800, TARGET, "compute.y").view("float32", (2, 100))
        launch = replace(bind(blend, 4, {"x": x, "y": y, "n": 100}), number=4711)
        called_at = CallSite()
        if freed:
            x.buffer.free()
        table = blend.access_table
        (site,) = [n for n, s in enumerate(table.sites) if (s.origin.text, s.how) == (text, how)]
        words = np.zeros(REPORT_WORDS, np.int64)
        for n, (kind, count, block, thread, *axes) in enumerate(records):
            record = Record(site, chain, kind, count, block, thread, tuple(axes[:4]), tuple(axes[4:]))
            words[1 + n * RECORD_WORDS :][:RECORD_WORDS] = record.words
            words[0] += count
        run = Run(launch, called_at, world.allocator, "target.0", TARGET)
        check(name, "\n\n".join(map(render, findings(words, run))))

    def test_a_load_in_a_device_function(self, world):
        record = (OUTSIDE, 28, 3, 4, 100, 0, 0, 0, 100, 0, 0, 0)
        self.report(world, "mem010_load", "values[i]", "load", record, chain=1)

    def test_a_negative_load(self, world):
        record = (OUTSIDE, 1, 0, 0, -1, 0, 0, 0, 100, 0, 0, 0)
        self.report(world, "mem010_negative", "x[i - 1]", "load", record)

    def test_a_store_along_one_axis_in_the_arena(self, world):
        record = (OUTSIDE, 1, 2, 31, 1, -260, 0, 0, 2, 100, 0, 0)
        self.report(world, "mem011_neighbour", "y[1, i]", "store", record)

    def test_a_load_of_shared_memory(self, world):
        record = (OUTSIDE, 96, 1, 0, 32, 0, 0, 0, 32, 0, 0, 0)
        self.report(world, "mem010_shared", "tile[i]", "load", record)

    def test_a_read_of_what_nothing_wrote(self, world):
        record = (UNWRITTEN, 7, 2, 29, 93, 0, 0, 0, 100, 0, 0, 0)
        self.report(world, "mem012_unwritten", "x[i - 1]", "load", record)

    def test_a_read_of_what_was_freed(self, world):
        record = (USED_AFTER_FREE, 100, 0, 0, 5, 0, 0, 0, 100, 0, 0, 0)
        self.report(world, "mem013_freed", "x[i - 1]", "load", record, freed=True)


def test_store_in_a_kernel():
    finding = Finding(
        code="MEM011",
        message="index 1024 of axis 0, which has 1024 elements",
        size=4,
        offset=4096,
        buffer=BufferFacts("compute.q", "target", 0x7F0000000100, 4096),
        access=(Frame("/no/such/test_report_text.py", 12, "axpy"),),
        previous=(Frame("/no/such/test_report_text.py", 40, "launch"),),
        kernel="axpy",
        source=Frame("/no/such/test_report_text.py", 12, "axpy"),
        launch=9,
        argument="y",
        block=(4, 0, 0),
        thread=(255, 0, 0),
        stream="target.0",
        actor="target",
        device="host",
        notes=("the store was suppressed",),
        count=32,
    )
    check("mem011_store", render(finding))


class TestPlace:
    @pytest.mark.parametrize(
        ("offset", "place"),
        [
            (-1, "1 byte left of the 10-byte buffer x"),
            (-300, "300 bytes left of the 10-byte buffer x"),
            (0, "0 bytes inside the 10-byte buffer x"),
            (9, "9 bytes inside the 10-byte buffer x"),
            (10, "0 bytes right of the 10-byte buffer x"),
            (11, "1 byte right of the 10-byte buffer x"),
            (None, "the 10-byte buffer x"),
        ],
    )
    def test_sides(self, offset, place):
        finding = Finding(
            code="MEM002", message="m", offset=offset, buffer=BufferFacts("x", "target", 256, 10)
        )
        assert describe_place(finding) == place

    def test_nothing_known(self):
        assert describe_place(Finding(code="ACC001", message="m", offset=3)) == ""


class TestBytes:
    def marks(self, *window):
        text = render(Finding(code="MEM002", message="m", window=MemoryWindow(*window)))
        return text.split("Memory around")[1].split("\n\n")[0].splitlines()[1:]

    def test_caret_stands_under_its_byte(self):
        above, marks = self.marks(0x100, bytes(range(16)), 0x103, 0x104)
        assert above[marks.index("^") :].startswith("03 ")
        assert marks.count("^") == 2

    def test_damage_over_two_rows(self):
        lines = self.marks(0x100, bytes(range(64)), 0x11E, 0x122)
        assert [line[0] for line in lines] == [" ", ">", " ", ">", " ", " "]
        assert lines[2].count("^^") == 2
        assert lines[4].count("^^") == 2

    def test_window_that_starts_inside_a_row(self):
        above, marks = self.marks(0x10C, b"\xaa\xbb", 0x10D, 0x10E)
        assert above[marks.index("^") :] == "bb"

    def test_damage_beyond_the_window_is_counted(self):
        assert self.marks(0x100, bytes(16), 0x10F, 0x200)[-1] == "  and 240 bytes more"


def test_repetitions_are_told():
    finding = Finding(code="MEM002", message="m")
    assert "found" not in render(finding)
    assert "found 3 times" in render(replace(finding, count=3))
    assert not render(finding).endswith("\n")


def test_every_golden_report_is_checked():
    names = set(re.findall(r'(?:check\(|report\(world, )"(\w+)"', Path(__file__).read_text("utf-8")))
    assert names == {path.stem for path in GOLDEN.glob("*.txt")}
