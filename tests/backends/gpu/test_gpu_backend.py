"""The GPU backend is picked for arrays on a device; ops without kernels refuse them."""

import numpy as np
import pytest

import mpidl as dl
from mpidl import backends
from mpidl.autodiff.tape import Var
from mpidl.backends.gpu import array
from mpidl.backends.gpu.backend import GPU
from mpidl.backends.gpu.sums import Counts
from mpidl.blocks import Blocked, OneRank, share


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
    assert backends.of(images) is GPU
    with pytest.raises(TypeError, match="lies on a GPU.*--device cpu"):
        call(Var(images))
