"""Check that device arrays select the GPU backend, and that ops without a kernel raise errors."""

import numpy as np
import pytest

import mpidl as dl
from mpidl import backends
from mpidl.backends.gpu import array
from mpidl.backends.gpu.backend import GPU
from mpidl.backends.gpu.sums import Counts
from mpidl.backends.shapes import ChannelNorm
from mpidl.core.blocks import LANES, Blocked, OneRank, share
from mpidl.core.tape import Var


@pytest.fixture
def images(device):
    """Return 20 images (3, 4, 5) as a Blocked value on the GPU."""
    batch = share(20, OneRank(), device=Counts())
    return Blocked(array.lanes(np.ones((2, 3, 4, 5, 16), np.float32)), batch)


@pytest.mark.parametrize(
    "call",
    [
        dl.sum,
        dl.mean,
        dl.ops.exp,
        lambda x: x * np.float32(2),
        lambda x: dl.ops.divide(x, x),
        dl.op(lambda x: (x, lambda dy: (dy,))),
    ],
)
def test_ops_of_numpy_arrays_refuse_device_arrays(images, call):
    assert backends.of_value(images) is GPU
    with pytest.raises(
        TypeError, match="has no GPU kernel, but .* is on a GPU: run with --device cpu"
    ):
        call(Var(images))


def test_concat_and_cross_channel_norm_refuse_flattened_images(device):
    x = array.lanes(np.ones((1, 3, 2, 2, LANES), np.float32)).reshape(1, 12, LANES)
    with pytest.raises(ValueError, match="concat: on a GPU, expected images or features"):
        GPU.concat([x, x])
    with pytest.raises(ValueError, match="cross_channel_norm: on a GPU, expected"):
        GPU.cross_channel_norm(x, ChannelNorm(5, 1e-4, 0.75, 2.0))


def test_cross_channel_norm_refuses_windows_beyond_shared_memory(device):
    x = array.lanes(np.ones((1, 7000, LANES), np.float32))
    with pytest.raises(ValueError, match="at most 6144 channels, got 13999"):
        GPU.cross_channel_norm_dx(x, x, ChannelNorm(20000, 1e-4, 0.75, 2.0))
