"""Test which GPUs a process finds, or why it finds none, with a fake driver and CuPy."""

import sys
import types

from mpidl.backends import discovery
from mpidl.backends.discovery import Gpu, Visible


class Driver:
    """A fake libcuda.so.1 with the functions that `discovery` calls."""

    def __init__(self, count=1, version=13020, error=0):
        self.count, self.version, self.error = count, version, error

    def cuInit(self, flags):
        return self.error

    def cuDeviceGetCount(self, place):
        place._obj.value = self.count
        return 0

    def cuDriverGetVersion(self, place):
        place._obj.value = self.version
        return 0

    def cuGetErrorName(self, error, place):
        place._obj.value = b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"


def visible(monkeypatch, driver, packages=("cupy-cuda13x 14.2.0",), count=None, properties=()):
    """Return discovery.visible() with fakes. `count` is the result or error of getDeviceCount."""

    def load(name):
        if driver is None:
            raise OSError(name)
        return driver

    def get_device_count():
        if isinstance(count, Exception):
            raise count
        return count

    runtime = types.SimpleNamespace(
        getDeviceCount=get_device_count,
        getDeviceProperties=lambda i: properties[i],
        deviceGetPCIBusId=lambda i: f"0000:0{i}:00.0",
        driverGetVersion=lambda: driver.version,
        runtimeGetVersion=lambda: 13020,
    )
    cupy = types.ModuleType("cupy")
    cupy.cuda, cupy.__version__ = types.ModuleType("cupy.cuda"), "14.2.0"
    cupy.cuda.runtime = runtime
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.setattr(discovery.ctypes, "CDLL", load)
    monkeypatch.setattr(discovery, "packages", lambda: list(packages))
    return discovery.visible()


def test_the_reason_why_no_gpu_is_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible(monkeypatch, None) == Visible((), "no NVIDIA driver")
    no_device = Driver(0, error=discovery.NO_DEVICE)
    assert visible(monkeypatch, no_device) == Visible((), "the NVIDIA driver finds no GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible(monkeypatch, no_device).reason == "CUDA_VISIBLE_DEVICES= hides every GPU"
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in visible(monkeypatch, Driver(error=803)).reason
    without_cupy = visible(monkeypatch, Driver(2), packages=())
    assert without_cupy == Visible((), "CuPy is not installed: run/install --with cuda13", 2)
    assert "--with cuda12" in visible(monkeypatch, Driver(version=12040), packages=()).reason
    old_driver = visible(monkeypatch, Driver(version=12040), count=RuntimeError("insufficient"))
    assert old_driver.reason == (
        "the NVIDIA driver supports CUDA up to 12.4, but cupy-cuda13x 14.2.0 is built for 13.2: "
        "install CuPy for CUDA 12 or a newer driver"
    )
    failing = visible(monkeypatch, Driver(), count=RuntimeError("in a bad way"))
    assert failing == Visible((), "cupy-cuda13x 14.2.0: in a bad way", 1)


def test_visible_gpus_are_described_without_too_old_ones(monkeypatch):
    def gpu(**changes):
        h200 = {"name": b"NVIDIA H200", "major": 9, "minor": 0, "uuid": b"\x01\xab"}
        return {**h200, "multiProcessorCount": 132, "totalGlobalMem": 141 << 30, **changes}

    old = gpu(name=b"Tesla P100", major=6)
    both = visible(monkeypatch, Driver(2), count=2, properties=[old, gpu()])
    assert both.gpus == (Gpu(1, "0000:01:00.0 01ab", "NVIDIA H200", "sm_90", 132, 141 << 30),)
    only_old = visible(monkeypatch, Driver(1), count=1, properties=[old])
    assert only_old == Visible((), "Tesla P100 (sm_60) is older than sm_70", 1)
    assert discovery.versions() == discovery.Versions("14.2.0", "13.2", "13.2")


def test_this_machine_has_gpus_or_a_reason():
    machine = discovery.visible()
    assert bool(machine.gpus) != bool(machine.reason)
