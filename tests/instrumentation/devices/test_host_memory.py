"""Memory of the host: alignment, exhaustion, and the bytes themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrumentation.devices import open_device
from instrumentation.devices.base import MemoryInfo
from instrumentation.devices.host import HostDevice
from instrumentation.devices.host_memory import HostMemory
from instrumentation.errors import BadInputError, DeviceError, OutOfMemoryError


@pytest.mark.parametrize("nbytes", [1, 255, 4096, 4097, 1 << 20])
def test_addresses_are_aligned_and_bytes_are_there(nbytes: int):
    memory = HostMemory()
    address = memory.allocate(nbytes)
    assert address % memory.alignment == 0
    memory.fill_bytes(address, nbytes, 0xAB)
    assert memory.read_bytes(address, nbytes) == b"\xab" * nbytes
    memory.release(address)


def test_the_machine_has_memory():
    info = HostMemory().memory_info()
    assert 0 < info.free <= info.total
    with pytest.raises(AssertionError):
        MemoryInfo(2, 1)


def test_more_than_the_machine_has_is_refused_with_sizes():
    memory = HostMemory()
    with pytest.raises(
        OutOfMemoryError, match="host memory: 1,152,921,504,606,846,976 bytes were asked for and"
    ):
        memory.allocate(1 << 60)


def test_a_release_of_what_was_never_allocated_is_refused():
    memory = HostMemory()
    address = memory.allocate(16)
    memory.release(address)
    with pytest.raises(DeviceError, match=f"release of {address:#x}"):
        memory.release(address)


@given(
    nbytes=st.sampled_from([1, 7, 1000, (1 << 20) - 1, (1 << 20) + 5]),
    wrong=st.floats(0, 1, exclude_max=True),
    data=st.data(),
)
def test_the_first_wrong_byte_is_found(nbytes: int, wrong: float, data: st.DataObject):
    memory = HostMemory()
    address = memory.allocate(nbytes)
    memory.fill_bytes(address, nbytes, 0xFA)
    assert memory.first_mismatch(address, nbytes, 0xFA) == -1
    at = int(wrong * nbytes)
    memory.fill_bytes(address + at, data.draw(st.integers(1, nbytes - at)), 0)
    assert memory.first_mismatch(address, nbytes, 0xFA) == at
    memory.release(address)


def test_devices_have_names():
    for name in ("auto", "host"):
        device = open_device(name, threads=1)
        assert isinstance(device, HostDevice)
        assert device.describe().startswith("host: 1 threads, ")
    with pytest.raises(BadInputError, match="device 'gpu' is unknown; use"):
        open_device("gpu")


def test_fresh_memory_is_writable_to_its_last_byte():
    memory = HostMemory()
    blocks = [memory.allocate(100) for _ in range(10)]
    for i, address in enumerate(blocks):
        memory.fill_bytes(address, 100, i)
    assert all(set(memory.read_bytes(address, 100)) == {i} for i, address in enumerate(blocks))
    assert np.all(np.diff(sorted(blocks)) >= 100)
