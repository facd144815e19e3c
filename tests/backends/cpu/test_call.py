"""Kernels call a Python function while they run, so that messages of other ranks travel."""

import numpy as np
import pytest
from cpu_builds import needs_kernels

from mpidl.backends import CPU as cpu
from mpidl.backends.cpu import builds

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def _unwatched():
    yield
    builds.watch(None)


def work():
    """Convolve for some tens of milliseconds in one call."""
    x = np.zeros((4, 32, 32, 32, 16), np.float32)
    weight, bias = np.zeros((32, 32, 5, 5), np.float32), np.zeros(32, np.float32)
    return cpu.conv2d(x, weight, bias, (1, 1), ((2, 2), (2, 2)), (1, 1), 1)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_function_is_called_while_a_kernel_runs(threads):
    calls = []
    builds.kernels().set_threads(threads)
    try:
        builds.watch(lambda: calls.append(1))
        work()
        assert len(calls) >= 3
        builds.watch(None)
        count = len(calls)
        work()
        assert len(calls) == count
    finally:
        builds.kernels().set_threads(1)


def test_an_exception_of_the_function_is_raised_later():
    calls = []

    def fail():
        calls.append(1)
        raise KeyError("lost")

    builds.watch(fail)
    work()
    assert len(calls) == 1  # not again, and the kernel ended
    with pytest.raises(KeyError, match="lost"):
        builds.watch(None)
    builds.watch(None)
