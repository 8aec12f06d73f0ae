"""Minimal programs run on the host device and on the CUDA device over a driver of host memory."""

from __future__ import annotations

import pytest
from engines import Bench
from fake_cuda import fake_device

from instrumentation.devices.host import HostDevice


@pytest.fixture(params=["host", "cuda"])
def bench(request):
    """A device at level guard, with a stream of the target."""
    return Bench(device=fake_device() if request.param == "cuda" else HostDevice(1))
