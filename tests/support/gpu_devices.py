"""Provide the GPU for tests of kernels: an emulated GPU or, with `--device cuda`, a real GPU.

A real GPU schedules its threads itself, so there, tests of several schedules repeat the same work.
"""

import contextlib

import pytest
from emulator import compiler, opened

from mpidl.backends.gpu import launching


@pytest.fixture
def device(request):
    """Yield an open device. The fixture's indirect parameter is the schedule: 0, 1 or 2."""
    with _opened(request)(getattr(request, "param", 0)) as device:
        yield device


@pytest.fixture
def emulated(request):
    """Return a function that opens a device: `with emulated(order, **options) as device`."""
    return _opened(request)


def is_cuda(config):
    return config.getoption("--device", "emulated") == "cuda"


def _opened(request):
    if is_cuda(request.config):
        return on_cuda
    if compiler.find() is None:
        pytest.skip("no g++, which the emulated GPU compiles kernels with")
    return opened


@contextlib.contextmanager
def on_cuda(order=0, truncate=False, architecture=None, **facts):
    """Open a real GPU in place of `emulator.opened`; `facts` replaces attributes of the device.

    A GPU sets its own schedule and rounding, so `order` and `truncate` have no effect.
    """
    from mpidl.backends.gpu.cuda_device import CudaDevice

    device = CudaDevice()
    if architecture not in (None, device.architecture):
        device.close()
        pytest.skip(f"for {architecture}, the GPU is {device.architecture}")
    device.launched, launch = [], device.launch

    def record(handle, launched):
        device.launched.append(launched.name)
        launch(handle, launched)

    device.launch = record
    vars(device).update(facts)
    launching.open(device)
    try:
        yield device
    finally:
        launching.open(None)
        device.close()
