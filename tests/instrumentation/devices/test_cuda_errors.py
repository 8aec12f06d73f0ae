"""What fails: calls of the driver, the device itself, and machines without one."""

import subprocess
import sys

import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from engines import TARGET, Bench, increment
from fake_cuda import FakeDriver, fake_device, fake_image

from instrumentation import devices
from instrumentation.devices import cuda, cuda_driver, open_device
from instrumentation.devices.cuda import CudaDevice
from instrumentation.devices.cuda_bindings import CudaDriver
from instrumentation.devices.cuda_driver import (
    STICKY,
    DriverCallError,
    check_version,
    open_driver,
)
from instrumentation.devices.host import HostDevice
from instrumentation.errors import BadInputError, DeviceError, OutOfMemoryError
from instrumentation.levels import Level


class World:
    """A bench with a graph, an event and a second stream: something of everything."""

    def __init__(self, level: Level = Level.GUARD) -> None:
        self.bench = Bench(level, device=fake_device())
        self.device, self.stream = self.bench.device, self.bench.stream
        self.driver = self.device.context.driver
        self.arena = self.bench.arena()
        self.y, self.z = (self.bench.put(self.arena, np.zeros(40, np.float32), name) for name in "yz")
        self.event = self.device.create_event(owner=TARGET, name="ready")
        self.other = self.device.create_stream(owner=TARGET, name="other")
        self.stream.begin_capture()
        self.stream.launch(increment, 2, {"y": self.y})
        self.graph = self.stream.end_capture("one")
        self.out = np.empty(40, np.float32)
        self.work()

    def work(self) -> None:
        self.stream.copy_in(self.y, np.ones(40, np.float32))
        self.stream.launch(increment, 2, {"y": self.y})
        self.stream.replay(self.graph)
        self.stream.record(self.event)
        self.other.wait(self.event)
        self.other.copy(self.z, self.y)
        self.other.fill(self.z, 0)
        self.other.copy_out(self.out, self.z)
        self.event.synchronize()
        self.other.synchronize()
        self.stream.synchronize()

    def give_up(self) -> None:
        self.graph.destroy()
        self.event.destroy()
        self.other.destroy()
        self.stream.destroy()
        self.y.buffer.free()
        self.z.buffer.free()
        self.arena.release()
        assert self.bench.allocator.table() == ()
        assert self.bench.allocator.close() == []


WORK = {
    "copy_in": "stream target of target", "launch": "stream target of target", "replay": "stream target of target",
    "record": "stream target of target", "wait": "stream other of target", "copy": "stream other of target",
    "fill": "stream other of target", "copy_out": "stream other of target",
    "synchronize_event": "event ready of target", "synchronize_stream": "stream other of target",
}  # fmt: skip


@pytest.mark.parametrize("call", WORK)
def test_a_call_that_fails_is_named_with_who_made_it_and_the_last_launch(call):
    world = World()
    world.driver.fail(call, "INVALID_VALUE")
    with pytest.raises(DeviceError) as caught:
        world.work()
    message = str(caught.value)
    assert message.startswith(
        f"cuda:0: {call} failed with CUDA_ERROR_INVALID_VALUE, called for {WORK[call]}; "
    )
    assert "the last launch was " in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    # Nothing is broken by it.
    world.work()
    assert (world.bench.get(world.y) == 3).all()
    world.give_up()
    assert world.driver.graphs == []
    assert world.driver.events == set()


@pytest.mark.parametrize("call", ["launch", "replay", "copy_in"])
def test_missing_memory_is_told_apart(call):
    world = World()
    world.driver.fail(call, "OUT_OF_MEMORY")
    with pytest.raises(
        OutOfMemoryError, match=f"cuda:0: {call} of stream target of target: not enough memory"
    ):
        world.work()
    world.work()


@pytest.mark.parametrize("call", ["create_stream", "allocate_pinned", "create_event", "load", "set_context"])
def test_what_fails_on_first_use_works_the_second_time(call):
    bench = Bench(Level.OFF, device=fake_device())
    driver = bench.device.context.driver
    y = bench.arena().reserve(160, owner=TARGET, name="y").unwrap().view(np.float32, 40)
    driver.fail(call, "NOT_SUPPORTED")

    def work():
        stream = bench.device.create_stream(owner=TARGET, name="new")
        stream.copy_in(y, np.zeros(40, np.float32))
        bench.device.create_event(owner=TARGET, name="new").destroy()
        stream.launch(increment, 2, {"y": y})
        bench.device.memory_info()
        stream.destroy()

    with pytest.raises(DeviceError, match=rf"{call} failed with CUDA_ERROR_NOT_SUPPORTED"):
        work()
    work()


@pytest.mark.parametrize("error", ["ILLEGAL_ADDRESS", "LAUNCH_FAILED", "ECC_UNCORRECTABLE"])
@pytest.mark.parametrize("level", [Level.OFF, Level.GUARD])
def test_a_lost_device_is_reported_once_and_given_up_quietly(error, level):
    world = World(level)
    world.driver.broken = {"increment": error}
    world.stream.launch(increment, 2, {"y": world.y})
    world.other.fill(world.z, 1)
    with pytest.raises(
        DeviceError, match=rf"synchronize_stream failed with CUDA_ERROR_{error}.*increment \(launch"
    ):
        world.stream.synchronize()
    calls = world.driver.calls.total()
    # What the other stream had queued is gone too, and it says so once.
    with pytest.raises(DeviceError, match=r"cuda:0: device lost \(.*\); start the process again"):
        world.other.synchronize()
    world.other.synchronize()
    world.stream.synchronize()
    for call in (
        lambda: world.stream.launch(increment, 2, {"y": world.y}),
        lambda: world.stream.copy_in(world.y, world.out),
        lambda: world.stream.copy_out(world.out, world.y),
        lambda: world.stream.copy(world.y, world.z),
        lambda: world.stream.fill(world.y, 0),
        lambda: world.stream.record(world.event),
        lambda: world.stream.wait(world.event),
        lambda: world.stream.replay(world.graph),
        world.event.synchronize,
        lambda: world.device.create_stream(owner=TARGET, name="late"),
        lambda: world.device.create_event(owner=TARGET, name="late"),
        lambda: world.device.allocate(64),
        lambda: world.device.read_bytes(world.y.address, 4),
        world.device.memory_info,
    ):
        with pytest.raises(DeviceError, match="device lost") as caught:
            call()
        assert len(str(caught.value)) < 250
        assert "\n" not in str(caught.value)
    world.stream.begin_capture()
    world.stream.launch(increment, 2, {"y": world.y})
    with pytest.raises(DeviceError, match="device lost"):
        world.stream.end_capture("late")
    world.give_up()
    assert world.driver.calls.total() == calls
    with pytest.raises(DeviceError, match="device lost"):
        CudaDevice(driver=world.driver, compile_kernel=fake_image)


def test_a_loss_seen_by_a_queueing_call_empties_the_queue():
    world = World()
    world.stream.fill(world.y, 0)
    world.driver.fail("copy_in", "ILLEGAL_ADDRESS")
    with pytest.raises(DeviceError, match="The device is lost to this process: start it again"):
        world.stream.copy_in(world.y, world.out)
    world.stream.synchronize()
    world.give_up()


def test_sticky_errors_are_names_that_the_driver_has():
    assert {result.name for result in CUresult} | {
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_CONTAINED",
    } >= STICKY


# --- machines


def test_one_context_for_all_devices_of_a_gpu():
    driver = FakeDriver()
    first, second = (CudaDevice(driver=driver, compile_kernel=fake_image) for _ in range(2))
    third = CudaDevice(1, driver=driver, compile_kernel=fake_image)
    assert first.context is second.context
    assert third.context is not first.context
    assert driver.calls["retain_context"] == 2


@pytest.mark.parametrize(
    ("n", "ordinal", "message"),
    [
        (2, 7, "device cuda:7: no such GPU; there is cuda:0 to cuda:1"),
        (1, 1, "device cuda:1: no such GPU; there is only cuda:0"),
        (0, 0, "device cuda:0: the driver sees no GPU; check CUDA_VISIBLE_DEVICES, or use host"),
    ],
)
def test_gpus_that_are_not_there(n, ordinal, message):
    with pytest.raises(BadInputError) as caught:
        CudaDevice(ordinal, driver=FakeDriver(n_devices=n), compile_kernel=fake_image)
    assert str(caught.value) == message


def test_a_gpu_that_others_have_filled():
    driver = FakeDriver()
    driver.fail("retain_context", "OUT_OF_MEMORY")
    with pytest.raises(OutOfMemoryError, match="cuda:0: the GPU has no memory left for another process"):
        CudaDevice(driver=driver, compile_kernel=fake_image)
    driver.fail("retain_context", "UNKNOWN")
    with pytest.raises(
        DeviceError, match="cuda:0 cannot be used: retain_context failed with CUDA_ERROR_UNKNOWN"
    ):
        CudaDevice(driver=driver, compile_kernel=fake_image)


def test_a_driver_older_than_the_toolkit():
    check_version(13000, "13.5.0")
    check_version(13020, "12.9.1")
    with pytest.raises(
        BadInputError, match=r"is for CUDA 12\.4 and the installed toolkit is CUDA 13; .*\[cu12\]"
    ):
        check_version(12040, "13.5.0")


@pytest.fixture
def no_driver(monkeypatch):
    monkeypatch.setattr(cuda_driver, "has_driver", lambda: False)
    open_driver.cache_clear()
    yield
    open_driver.cache_clear()


@pytest.fixture
def driver(monkeypatch):
    """A driver's library is there; what stands in for ``cuda.bindings.driver`` decides the rest."""
    monkeypatch.setattr(cuda_driver, "has_driver", lambda: True)
    open_driver.cache_clear()
    yield monkeypatch
    open_driver.cache_clear()


def test_no_driver(no_driver):
    for name in ("cuda", "cuda:1"):
        with pytest.raises(
            BadInputError, match="no NVIDIA driver on this machine; install the driver, or use host"
        ):
            open_device(name)
    assert isinstance(open_device("auto"), HostDevice)


def test_a_driver_that_fails_to_start(driver):
    def refuse(self, bindings):
        raise DriverCallError("cuInit", "CUDA_ERROR_NO_DEVICE")

    driver.setattr(CudaDriver, "__init__", refuse)
    with pytest.raises(
        BadInputError, match="cannot be used: cuInit failed with CUDA_ERROR_NO_DEVICE; see refengine doctor"
    ):
        open_device("cuda")
    assert isinstance(open_device("auto", threads=1), HostDevice)


def test_bindings_that_are_not_installed(driver):
    driver.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        BadInputError, match=r"the driver is here and Python's bindings for it are not .*refengine\[cu13\]"
    ):
        open_device("cuda")


def test_auto_takes_the_gpu(monkeypatch):
    monkeypatch.setattr(cuda_driver, "has_driver", lambda: True)
    monkeypatch.setattr(cuda, "open_driver", FakeDriver)
    monkeypatch.setattr(
        devices, "_open_cuda", lambda n: CudaDevice(n, driver=FakeDriver(), compile_kernel=fake_image)
    )
    assert open_device("auto").describe().startswith("cuda:0: Fake GPU 0")


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:\u0661", "cuda0", "hosts"])
def test_names_that_are_no_device(name):
    with pytest.raises(BadInputError, match="is unknown; use auto, host, cuda or cuda:N"):
        open_device(name)


def test_looking_for_a_driver_imports_no_cuda():
    code = (
        "import sys; from instrumentation.devices.cuda_driver import has_driver; has_driver(); "
        "assert not [m for m in sys.modules if m == 'cuda' or m.startswith('cuda.')], sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
