"""Minimal programs run on the host device and on the CUDA device over a driver of host memory."""

from __future__ import annotations

import pytest
from engines import Bench
from fake_cuda import fake_device

from instrumentation.devices.host import HostDevice
from instrumentation.levels import Level


@pytest.fixture(params=["host", "cuda"])
def bench(request):
    """A device at level guard, with a stream of the target."""
    return Bench(device=fake_device() if request.param == "cuda" else HostDevice(1))


@pytest.fixture(params=["host", "cuda"])
def audited(request):
    """As ``bench``, at level audit."""
    return Bench(Level.AUDIT, device=fake_device() if request.param == "cuda" else HostDevice(1))


@pytest.fixture
def audited_host():
    """The host device alone, at level audit: its copies read a host array when they run, as a GPU's from pinned memory.

    Those of the CUDA device go by way of page-locked memory of their own, and have read it when the call returns.
    """
    return Bench(Level.AUDIT, device=HostDevice(1))
