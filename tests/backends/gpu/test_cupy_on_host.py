"""Test the stand-in for CuPy (`tests/support/cupy_on_host`), and `CudaDevice` on it."""

import pytest
import stand_in

REFUSALS = """
import ctypes

import numpy as np
from cupy.cuda import driver, runtime
from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.cuda_device import CudaDevice
from mpidl.backends.gpu.kernels import Unit

device = launching.open(CudaDevice())
stream = device.stream
x = array.plain(np.arange(300.0, dtype=np.float32))

def refused(status, function, *arguments):
    try:
        function(*arguments)
    except runtime.CUDARuntimeError as error:
        assert error.status == status, error
    else:
        raise AssertionError(f"{function.__name__} was not refused")

# limits of launches
handle = device.load(Unit("elementwise"))["zero_words"]
values = [ctypes.c_void_p(x.address), ctypes.c_longlong(0)]
places = (ctypes.c_void_p * 2)(*map(ctypes.addressof, values))
def start(grid=(1, 1, 1), block=(256, 1, 1), shared=0):
    driver.launchKernel(handle, *grid, *block, shared, device.stream, ctypes.addressof(places), 0)
start()
refused(1, start, (0, 1, 1))
refused(1, start, (1, 65536, 1))
refused(1, start, (1, 1, 1), (2048, 1, 1))
refused(1, start, (1, 1, 1), (0, 1, 1))
refused(1, start, (1, 1, 1), (256, 1, 1), 1 << 20)
driver.funcSetAttribute(handle, 8, 1000)
refused(1, start, (1, 1, 1), (256, 1, 1), 1001)  # only with opt-in
values[0].value = 12345
refused(700, start)  # not memory of the GPU
values[0].value = x.address

# captures
pinned = device.pinned(64)
block = runtime.malloc(256)
def inside():
    refused(900, runtime.malloc, 256)
    refused(900, runtime.hostAlloc, 64, 3)
    refused(900, runtime.free, block)
    refused(900, runtime.streamSynchronize, stream)
    host = np.zeros(4, np.uint8)
    refused(900, runtime.memcpyAsync, x.address, host.ctypes.data, 4, 1, stream)
    start()
before = x.numpy()
graph = device.capture(inside)
assert np.array_equal(x.numpy(), before)
graph.launch()
def beside(end):
    device.aside()
    start()
    token = device.back()
    start()
    end(token)
refused(904, device.capture, lambda: beside(lambda token: None))  # nothing waits for the stream
outside = device.mark()
refused(905, device.capture, lambda: device.join(outside))
values[1].value = 300
device.capture(lambda: beside(device.join)).launch()
assert not x.numpy().any()
runtime.free(block)
refused(1, runtime.free, block)  # twice
refused(1, runtime.memcpyAsync, block, x.address, 4, 3, stream)
refused(2, runtime.malloc, runtime.TOTAL)
refused(400, runtime.streamSynchronize, 99999)
print("refused all")
"""

FAILING = """
import numpy as np
import mpidl as dl
from cupy.cuda import runtime

run = runtime.device._run
def failing(kernel, *arguments):
    if kernel.name.startswith("conv_dweight"):
        raise RuntimeError("an illegal memory access was encountered")
    run(kernel, *arguments)
runtime.device._run = failing
world = dl.World(threads=1)
world.use_device("gpu")
images = np.zeros((20, 1, 8, 8), np.uint8)
layers = [dl.Conv2D(3, 8, name="first"), dl.ReLU(), dl.Dense(2)]
net = dl.Network(layers, (1, 8, 8), seed=0)
options = dl.TrainingOptions(epochs=1, batch_size=20, verbose_every=0)
dl.train(net, dl.ArrayDatastore(images, np.arange(20) % 2), options, world=world)
"""

LIVING = """
import sys
import numpy as np
from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.cuda_device import CudaDevice

device = launching.open(CudaDevice())
x = array.plain(np.zeros(300, np.float32))
sys.living = [x, device, device.mark(), device.pinned(64), device.capture(lambda: None)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of the stand-in's libraries and of the cache of cubins."""
    return tmp_path_factory.mktemp("stand-in")


def run(folder, script, **variables):
    env = stand_in.environment(folder) | variables
    return stand_in.run(folder, env["MPIDL_PYTHON"], "-c", script, env=env)


def test_the_stand_in_refuses_what_a_gpu_refuses(folder):
    job = run(folder, REFUSALS)
    assert job.stdout == "refused all\n" and job.returncode == 0, job.stderr


def test_an_error_names_the_kernel_if_launches_are_synchronous(folder):
    job = run(folder, FAILING, MPIDL_SYNCHRONOUS="1")
    last = job.stderr.strip().splitlines()[-1]
    assert job.returncode and "backward / dense1" in last, job.stderr
    assert "conv_dweight: grid (" in last and "block (" in last
    assert last.endswith("an illegal memory access was encountered")
    job = run(folder, FAILING)
    last = job.stderr.strip().splitlines()[-1]
    assert job.returncode and "MPIDL_SYNCHRONOUS=1" in last, job.stderr


def test_objects_that_outlive_the_modules_raise_nothing(folder):
    job = run(folder, LIVING)
    assert (job.returncode, job.stderr) == (0, "")
