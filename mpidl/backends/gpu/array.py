"""Create Arrays on a GPU, with the memory order that the kernels expect.

Images are stored in blocks of 16. The slot of one image in a block is a lane. The `shape` of an
Array is the same in all backends. Its attributes `dims` and `order` describe how the GPU backend
stores the elements:

    value            shape                 dims                   order in memory
    images           (blocks, C, H, W, 16) the same               blocks, 16, H, W, C  (NHWC)
    flattened        (blocks, C*H*W, 16)   (blocks, C, H, W, 16)  as before flattening
    filters          (K, C, R, S)          the same               K, R, S, C           (KRSC)
    dense weights    (K, C*H*W)            (K, C, H, W)           K, H, W, C
    anything else    (...)                 the same               C order
"""

import functools
import itertools

import numpy as np

from mpidl.backends.gpu import launching
from mpidl.backends.gpu.launching import Array as Array
from mpidl.backends.gpu.launching import empty as empty
from mpidl.backends.gpu.launching import empty_like as empty_like
from mpidl.core.blocks import LANES

IMAGES = (0, 4, 2, 3, 1)  # memory order of the axes (blocks, C, H, W, 16)
VALUES = (0, 2, 1)  # memory order of the axes (blocks, F, 16)
FILTERS = (0, 2, 3, 1)  # memory order of the axes (K, C, R, S)
PART = 64  # arrays that share one allocation start at multiples of 64 floats


def order_of_lanes(dims):
    """Return the memory order of lanes with dims (blocks, *image_shape, 16)."""
    return {5: IMAGES, 3: VALUES}.get(len(dims), (0, len(dims) - 1, *range(1, len(dims) - 1)))


class Bounds:
    """Minimum and maximum of the integers in an Array, for checks by the host without a download.

    `limits` are (smallest, largest), or None while a training step is recorded: every mini-batch
    has different integers.
    """

    def __init__(self, limits=None):
        self.limits, self.checks = limits, []

    def hold(self, check):
        """Call check(smallest, largest) now, or in each call of `say` if the limits are unknown.

        `check` is a function that raises an exception if the integers are invalid.
        """
        if self.limits is None:
            self.checks.append(check)
        else:
            check(*self.limits)

    def say(self, smallest, largest):
        """Call all checks that were stored by `hold`, with the limits of a mini-batch."""
        for check in self.checks:
            check(smallest, largest)


def in_memory(array, dims, order):
    """Reshape a NumPy array to `dims`, transpose it to `order`, and return it C-contiguous."""
    return np.ascontiguousarray(np.reshape(array, dims).transpose(order))


def empty_lanes(shape, dtype=np.float32):
    """Return an uninitialized Array of lanes with shape (blocks, *image_shape, 16)."""
    y = launching.empty(tuple(shape), dtype)
    y.order = order_of_lanes(y.dims)
    return y


def lanes(array):
    """Upload lanes, an array (blocks, *image_shape, 16), and return the Array."""
    array = np.asarray(array)
    if array.shape[-1] != LANES:
        raise ValueError(f"expected (blocks, ..., {LANES}) lanes, got {array.shape}")
    return _upload(array, array.shape, order_of_lanes(array.shape))


def filters(array, image_shape=None):
    """Upload weights (K, C, R, S), or (K, F) for flattened images of `image_shape`.

    Return the Array.
    """
    array = np.asarray(array)
    return _upload(array, *layout_of_weights(array.shape, image_shape))


def layout_of_weights(shape, image_shape=None):
    """Return the (dims, order) that `filters` uses for weights of this shape."""
    if len(shape) == 2 and image_shape is not None and len(image_shape) == 3:
        shape = (shape[0], *image_shape)
    return shape, FILTERS if len(shape) == 4 else tuple(range(len(shape)))


def plain(array):
    """Upload an array, and return it as an Array in C order."""
    array = np.asarray(array)
    return _upload(array, array.shape, range(array.ndim))


def placed(value, like):
    """Upload a NumPy array; return an Array with the dtype, shape and memory order of `like`."""
    return _upload(np.asarray(value, like.dtype), like.dims, like.order)


def together(arrays, image_shapes):
    """Upload {name: array} in float32 into one allocation of device memory; return {name: Array}.

    `image_shapes` are the arguments `image_shape` of `filters` for weights of flattened images.
    """
    values = {name: np.asarray(value, np.float32) for name, value in arrays.items()}
    starts, total = places(tuple(value.size for value in values.values()))
    memory, uploaded = launching.persistent((total,)), {}
    for (name, value), start in zip(values.items(), starts, strict=True):
        array = memory.part(start, value.shape)
        array.dims, array.order = layout_of_weights(value.shape, image_shapes.get(name))
        launching.upload(array, in_memory(value, array.dims, array.order))
        uploaded[name] = array
    return uploaded


@functools.lru_cache(maxsize=16)
def places(sizes):
    """Place arrays of the given sizes in one large array; return (first floats, size of the array).

    All sizes count floats, and an array begins at a multiple of PART floats.
    """
    rounded = [-(-size // PART) * PART for size in sizes]
    starts = list(itertools.accumulate(rounded, initial=0))
    return starts[:-1], starts[-1]


def _upload(array, dims, order):
    y = launching.empty(tuple(dims), array.dtype)
    y.shape, y.order = array.shape, tuple(order)
    launching.upload(y, in_memory(array, dims, y.order))
    return y
