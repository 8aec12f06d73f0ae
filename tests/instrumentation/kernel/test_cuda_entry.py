"""What PTX says at a kernel's entry: threads, residency, fetches ahead, and the wait that makes early starts safe."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrumentation.errors import DeviceError
from instrumentation.kernel import RowsAhead, kernel
from instrumentation.kernel.cuda_entry import with_entry
from instrumentation.kernel.cuda_image import build_image, entry_of, image_path
from instrumentation.kernel.types import f32, f32_1d, f32_2d, u8_2d

HOPPER, AMPERE = (9, 0), (8, 0)


def entry_lines(ptx: str) -> list[str]:
    """Instructions and directives behind the parameter list, in order."""
    body = ptx[ptx.index(")", ptx.index(".entry")) + 1 :]
    return [line.strip() for line in body.splitlines() if line.strip()]


@kernel(block=(32, 2), ahead=RowsAhead(2, (("codes", "halves"), ("more",))), resident=8, checked_resident=6)
def reader(scale: f32, codes: u8_2d, halves: u8_2d, more: u8_2d, x: f32_1d, y: f32_2d) -> None:
    y[0, 0] = scale * x[0] + codes[0, 0] + halves[0, 0] + more[0, 0]


@kernel(block=64)
def plain(x: f32_1d, y: f32_1d) -> None:
    y[0] = x[0]


def test_the_number_of_threads_stands_at_the_entry():
    for capability in (HOPPER, AMPERE):
        lines = entry_lines(reader.ptx(capability))
        assert lines[:2] == [".reqntid 32, 2, 1", ".minnctapersm 8"]
        assert entry_lines(plain.ptx(capability))[0] == ".reqntid 64, 1, 1"
        assert ".minnctapersm" not in plain.ptx(capability)
        assert entry_lines(reader.ptx(capability, checked=True))[:2] == [
            ".reqntid 32, 2, 1",
            ".minnctapersm 6",
        ]


@pytest.mark.parametrize("checked", [False, True])
def test_images_for_other_numbers_of_resident_blocks_are_others(monkeypatch, checked):
    before = image_path(reader, HOPPER, checked=checked)
    monkeypatch.setattr(reader, "checked_resident" if checked else "resident", 4)
    assert image_path(reader, HOPPER, checked=checked) != before


@pytest.mark.parametrize("made", [reader, plain], ids=["reader", "plain"])
def test_nothing_is_loaded_or_stored_before_the_wait(made):
    before, after = made.ptx(HOPPER).split("griddepcontrol.wait;")
    assert before.count("griddepcontrol.launch_dependents;") == 1
    assert not re.search(r"\b(ld|st|atom|red)\.(global|shared|volatile)", before)
    assert re.search(r"\bst\.global", after)


@pytest.mark.parametrize("made", [reader, plain], ids=["reader", "plain"])
def test_older_devices_get_none_of_it(made):
    assert "griddepcontrol" not in made.ptx(AMPERE)
    assert "prefetch" not in made.ptx(AMPERE)


def test_the_parameters_that_are_fetched_are_those_of_the_arrays():
    """A scalar first: slots are counted over it. Each array: number of rows, stride in bytes, address."""
    ptx = reader.ptx(HOPPER)
    entry, _ = entry_of(reader.name, ptx)
    before, _ = ptx.split("griddepcontrol.wait;")
    fetch = before[before.index("launch_dependents") :]
    numbers = [int(n) for n in re.findall(re.escape(entry) + r"_param_(\d+)\]", fetch)]
    # Nine slots an array of two dimensions: meminfo, parent, count, item size, address, extents, strides.
    rows, strides, addresses = ([first + k for first in (1, 10, 19)] for k in (5, 7, 4))
    assert sorted(set(numbers)) == sorted(rows + strides + addresses)
    assert fetch.count("cp.async.bulk.prefetch.L2.global") == 3


def test_it_assembles():
    for made in (reader, plain):
        assert build_image(made.name, made.ptx(HOPPER), HOPPER).data


def test_text_without_a_kernel_is_refused():
    with pytest.raises(DeviceError, match="no entry"):
        with_entry(".version 9.0\n", {}, (32,), HOPPER)


@given(rows=st.integers(-3, 40))
def test_rows_are_a_power_of_two(rows: int):
    if rows in (1, 2, 4, 8, 16, 32):
        assert RowsAhead(rows, (("x",),)).rows == rows
    else:
        with pytest.raises(AssertionError):
            RowsAhead(rows, (("x",),))
