"""The GPU backend defines the functions of the C backend, with the same arguments."""

import inspect

import numpy as np
import pytest

import mpidl as dl
from mpidl import backends
from mpidl.autodiff import Var
from mpidl.backends import cpu
from mpidl.backends.gpu import array, functions
from mpidl.backends.gpu.sums import Counts
from mpidl.blocks import Blocked, OneRank, share

# image_sums: which `dl.sum` and `dl.mean` ask for, see below; what the host does before
NOT_OFFERED = {"image_sums", "keyed_words", "planes", "warp"}
# What it has beside: data sets and arrays that lie there
ONLY_HERE = {"floats", "placed", "targets"}


@pytest.mark.parametrize("name", [n for n in functions.__all__ if n not in ONLY_HERE])
def test_the_arguments_are_those_of_the_c_kernels(name):
    ours, theirs = (inspect.signature(getattr(m, name)).parameters for m in (functions, cpu))
    assert list(ours)[: len(theirs)] == list(theirs)
    for parameter, other in zip(ours.values(), theirs.values(), strict=False):
        assert (parameter.default is parameter.empty) == (other.default is other.empty)
    extra = list(ours.values())[len(theirs) :]
    assert all(p.default is not inspect.Parameter.empty for p in extra)


def test_what_is_not_offered_is_listed():
    assert set(cpu.__all__) - set(functions.__all__) == NOT_OFFERED
    assert set(functions.__all__) - set(cpu.__all__) == ONLY_HERE


@pytest.fixture
def images(device):
    """Blocked on the GPU: 20 images (3, 4, 5)."""
    batch = share(20, OneRank(), device=Counts())
    return Blocked(array.lanes(np.ones((2, 3, 4, 5, 16), np.float32)), batch)


@pytest.mark.parametrize(
    "call",
    [
        dl.sum,
        dl.mean,
        dl.ops.exp,
        lambda x: x * np.float32(2),
        lambda x: dl.ops.multiply(x, x),
        dl.op(lambda x: (x, lambda dy: (dy,))),
    ],
)
def test_ops_that_work_on_numpy_arrays_say_so(images, call):
    assert backends.of(images) is functions
    with pytest.raises(TypeError, match="lies on a GPU.*--device cpu"):
        call(Var(images))
