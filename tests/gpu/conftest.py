"""The GPU that the kernels' tests compute on: an emulated one, or by `--device cuda` a real one.

On a real GPU the threads' schedule is its own, so that what is tested by several schedules is
repeated there; tests that compute on no device are left out.
"""

import contextlib
from pathlib import Path

import pytest
from emulator import compiler, opened

from mpidl.backends.gpu import launching


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        choices=["emulated", "cuda"],
        default="emulated",
        help="where the kernels' tests compute (emulated)",
    )


def pytest_collection_modifyitems(config, items):
    if not _on_cuda(config):
        return
    here = Path(__file__).parent
    used = {"device", "emulated"}
    without = [i for i in items if here in i.path.parents and not used & set(i.fixturenames)]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]


@pytest.fixture
def device(request):
    """A device that is open. Parametrized indirectly, it takes a schedule: `0, 1, 2`."""
    with _opened(request)(getattr(request, "param", 0)) as found:
        yield found


@pytest.fixture
def world(device):
    """One rank that computes on the device."""
    from mpidl.backends.gpu.sums import Counts
    from mpidl.comm import World

    made = World(threads=1)
    made.device, made.counts = device, Counts()
    yield made
    made.device = made.counts = None


@pytest.fixture
def emulated(request):
    """Opens devices by turns: `with emulated(order, **options) as device`."""
    return _opened(request)


def _on_cuda(config):
    return config.getoption("--device", "emulated") == "cuda"


def _opened(request):
    if _on_cuda(request.config):
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
