"""The GPU that the kernels' tests compute on: an emulated one, or by `--device cuda` a real one.

On a real GPU the threads' schedule is its own, so that what is tested by several schedules is
repeated there.
"""

import contextlib

import pytest
from emulator import compiler, opened

from mpidl.backends.gpu import launching


@pytest.fixture
def device(request):
    """A device that is open. Parametrized indirectly, it takes a schedule: `0, 1, 2`."""
    with _opened(request)(getattr(request, "param", 0)) as found:
        yield found


@pytest.fixture
def emulated(request):
    """Opens devices by turns: `with emulated(order, **options) as device`."""
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
def on_cuda(order=0, truncate=False, architecture=None, **said):
    """As `emulator.opened`, for a GPU: order and truncate are its own, `said` is what it says of
    itself instead of the truth."""
    from mpidl.backends.gpu.cuda_device import CudaDevice

    device = CudaDevice()
    if architecture not in (None, device.architecture):
        device.close()
        pytest.skip(f"for {architecture}, the GPU is {device.architecture}")
    device.launched, launch = [], device.launch

    def noted(handle, what):
        device.launched.append(what.name)
        launch(handle, what)

    device.launch = noted
    device.specialize = False  # or each of many shapes would be compiled by itself
    vars(device).update(said)
    launching.open(device)
    try:
        yield device
    finally:
        launching.open(None)
        device.close()
