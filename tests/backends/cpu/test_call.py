"""Test calls of CPU kernels: the progress hook, threads, forks, scratch memory and shapes."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from cpu_builds import needs_kernels

import mpidl as dl
from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.backends.shapes import Geometry

pytestmark = needs_kernels

UNIT = (1, 1)


def convolve(channels=32, side=32, size=5):
    """Run a convolution that takes some tens of milliseconds in one call."""
    x = np.ones((4, channels, side, side, 16), np.float32)
    weight = np.ones((channels, channels, size, size), np.float32)
    pad = size // 2
    geometry = Geometry(UNIT, ((pad, pad), (pad, pad)))
    return cpu.conv2d(x, weight, np.zeros(channels, np.float32), geometry)


@pytest.fixture(autouse=True)
def _restored():
    yield
    builds.watch(None)
    builds.kernels().set_threads(settings.threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_hook_is_called_while_a_kernel_runs(threads):
    calls = []
    builds.kernels().set_threads(threads)
    builds.watch(lambda: calls.append(1))
    convolve()
    assert len(calls) >= 3
    builds.watch(None)
    count = len(calls)
    convolve()
    assert len(calls) == count


def test_an_exception_of_the_hook_is_raised_later():
    calls = []

    def fail():
        calls.append(1)
        raise KeyError("lost")

    builds.watch(fail)
    convolve()
    assert len(calls) == 1  # after the error, the hook is not called again, and the kernel ends
    with pytest.raises(KeyError, match="lost"):
        builds.watch(None)
    builds.watch(None)


def test_a_kernel_must_not_call_another():
    small = np.ones((1, 1, 1, 1, 16), np.float32)
    builds.watch(lambda: cpu.relu(small))
    convolve()
    with pytest.raises(RuntimeError, match="progress hook of another kernel"):
        builds.watch(None)
    assert (cpu.relu(small) == small).all()  # later calls work


def test_the_hook_runs_only_on_the_thread_that_set_it():
    ran_on = []
    builds.watch(lambda: ran_on.append(threading.get_ident()))
    other = threading.Thread(target=convolve)
    other.start()
    other.join()
    assert ran_on == []
    convolve()
    assert set(ran_on) == {threading.get_ident()}


@pytest.mark.parametrize("policy", ["off", "auto"])
def test_the_hook_is_called_within_a_block(policy, monkeypatch):
    """There is only one block, so all calls of the hook come from within the block."""
    calls = []
    monkeypatch.setattr(settings, "winograd", policy)
    x = np.ones((1, 96, 28, 28, 16), np.float32)
    weight = np.ones((96, 96, 3, 3), np.float32)
    builds.watch(lambda: calls.append(1))
    cpu.conv2d(x, weight, np.zeros(96, np.float32), Geometry(UNIT, (UNIT, UNIT)))
    assert len(calls) >= 4


def test_python_threads_take_turns():
    expected = convolve()
    outputs = []
    threads = [threading.Thread(target=lambda: outputs.append(convolve())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 3 and all((y == expected).all() for y in outputs)


FORK = """
import os
import numpy as np
from mpidl import backends
from mpidl.backends import CPU as cpu
backends.configure(threads=3)
x = np.ones((5, 4, 8, 8, 16), np.float32)
before = cpu.relu(x).sum()
child = os.fork()
if child == 0:
    os._exit(0 if cpu.relu(x).sum() == before else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0 and cpu.relu(x).sum() == before
print("both went on")
"""


def test_kernels_work_in_a_forked_child():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-c", FORK], env=environment, capture_output=True, text=True
    )
    assert process.stdout == "both went on\n", process.stderr


# Each call runs in a forked child, whose kernels have no scratch memory yet. A limit on the address
# space prevents the child from allocating scratch memory. Results use free memory of an arena.
SCARCE = """
import os, resource, sys

from cases import CASES
from conformance import arguments, call, share
from cpu_builds import bytes_of

from mpidl.backends import CPU
from mpidl.backends.cpu import arenas

def limit(nbytes):
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, resource.RLIM_INFINITY))

def grow_stack():
    # use some MB of the stack before the limit, because the stack cannot grow afterwards
    sys.setrecursionlimit(10000)
    nested = []
    for _ in range(9000):
        nested = [nested]
    repr(nested)

def is_refused(case):
    grow_stack()
    values = arguments(case, CPU, share(3))
    arenas.empty((16 << 20,))
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit(pages * os.sysconf("SC_PAGE_SIZE") + (1 << 20))
    try:
        call(case, CPU, values)
    except MemoryError as error:
        refused = "of scratch for a kernel" in str(error)
    else:
        refused = False
    limit(resource.RLIM_INFINITY)
    first, second = (bytes_of(call(case, CPU, arguments(case, CPU, share(3)))) for _ in range(2))
    return refused and first == second

checked = set()
for case in CASES:
    if case.function in set(sys.argv) - checked or "all" in sys.argv:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 9
            try:
                code = int(is_refused(case))
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        checked |= {case.function} if code == 1 else set()
        print(case.function, code)
"""
NEED_SCRATCH = ("conv2d", "conv2d_backward", "dense", "dense_backward", "cross_entropy")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "functions", [NEED_SCRATCH, pytest.param(("all",), marks=pytest.mark.slow("ranks"))]
)
def test_refused_scratch_memory_raises_memory_error(functions):
    """The process continues after the MemoryError, and later calls compute the right results."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-c", SCARCE, *functions], env=environment, capture_output=True, text=True
    )
    lines = [line.split() for line in process.stdout.splitlines()]
    assert process.returncode == 0, process.stderr
    assert {code for _, code in lines} <= {"0", "1"}, process.stdout + process.stderr
    assert {name for name, code in lines if code == "1"} >= set(NEED_SCRATCH), process.stdout


def test_a_stride_may_be_larger_than_the_image():
    x = np.arange(4 * 16, dtype=np.float32).reshape(1, 1, 2, 2, 16)
    weight = np.full((1, 1, 1, 1), 2, np.float32)
    geometry = Geometry((7000, 7000), ((0, 0), (0, 0)))
    y = cpu.conv2d(x, weight, np.zeros(1, np.float32), geometry)
    assert (y == 2 * x[:, :, :1, :1]).all()
    batch = dl.share(16, dl.OneRank())
    arguments = y, x, weight, geometry, batch.counts(), batch.tree, (True, True, True)
    gradients, expected = (backend.conv2d_backward(*arguments) for backend in (cpu, reference))
    assert (gradients[0] == expected[0]).all()


def test_images_that_are_too_large_are_refused():
    huge = np.lib.stride_tricks.as_strided(
        np.zeros(1, np.float32), (1, 64, 1600, 1600, 16), (0,) * 5
    )
    with pytest.raises(ValueError, match="too large"):
        cpu.conv2d.__globals__["plan"](
            huge, np.zeros((1, 64, 3, 3), np.float32), Geometry(UNIT, (UNIT, UNIT))
        )


def test_gradients_that_dilation_makes_too_large_are_refused():
    """The gradient of a single output pixel would be padded to 2001 x 2001 pixels."""
    image = np.lib.stride_tricks.as_strided(
        np.zeros(1, np.float32), (1, 1, 1001, 1001, 16), (0,) * 5
    )
    plan = cpu.conv2d.__globals__["plan"]
    geometry = Geometry(UNIT, ((0, 0), (0, 0)), (1000, 1000))
    with pytest.raises(ValueError, match="found 140140035"):
        plan(image, np.zeros((35, 1, 2, 2), np.float32), geometry)
    assert plan(image, np.zeros((30, 1, 2, 2), np.float32), geometry)[1] == (30, 1, 1)


def test_a_parameter_may_be_a_single_number():
    sgdm = dl.SGDM(learning_rate=0.5, momentum=0.9)
    table = {"scale": np.float32(3), "w": np.ones((2, 3), np.float32)}
    for _ in range(3):
        gradients = {name: np.ones_like(value) for name, value in table.items()}
        table = sgdm(table, gradients)
        assert {name: v.shape for name, v in table.items()} == {"scale": (), "w": (2, 3)}
