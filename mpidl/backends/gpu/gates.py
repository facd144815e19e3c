"""Multiply values with broadcasting, and scale channels, with kernels/cuda/gates.cu."""

import numpy as np

from mpidl.backends import shapes
from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.backends.gpu.fold import partial_of_leaves
from mpidl.core.blocks import LANES

THREADS = 256


def _in_memory(*values):
    """Return the shapes of images as they are in memory, with equally many axes.

    Raise ValueError if the values do not broadcast, as with the flattened images of one of them.
    """
    ndim = max(len(value.dims) for value in values)
    images = [value.dims[1:-1] + (1,) * (ndim - len(value.dims)) for value in values]
    if any(len(set(sizes) - {1}) > 1 for sizes in zip(*images, strict=True)):
        raise ValueError(
            f"multiply: on a GPU, expected images or features of shapes that broadcast, got "
            f"{', '.join(map(str, values))}: multiply before flattening"
        )
    order = array.order_of_lanes((0, *images[0], LANES))[2:]
    return [tuple(image[axis - 1] for axis in order) for image in images]


def _width(axes):
    """Return the number of neighbours along the last axis that a thread computes at once."""
    sizes, first, second = axes
    return 4 if all(n % 4 == 0 for n in (sizes[2], *first[:2], *second[:2])) else 1


def multiply(a, b):
    if a.shape == b.shape:
        return _product(a, b, array.empty_like(a))
    return _product(a, b, array.empty_lanes((a.dims[0], *_broadcast(a, b), LANES), a.dtype))


def _product(a, b, y):
    """Multiply a by b, and store the result in y, which has all axes of both."""
    axes = shapes.product_axes(*_in_memory(y, a, b))
    width, numbers = _width(axes), [n for part in axes for n in part]
    blocks, images = launching.blocks_of_threads(y.size // width), y.dims[0] * LANES
    arguments = a, b, y, images, *numbers
    launching.launch("multiply", blocks, THREADS, *arguments, defines={"WIDTH": width})
    return y


def _broadcast(a, b):
    """Return the shape of an image of a product."""
    images = [value.shape[1:-1] for value in (a, b)]
    ndim = max(map(len, images))
    return tuple(map(max, *(image + (1,) * (ndim - len(image)) for image in images)))


def multiply_dx(dy, other, x):
    dx = array.empty_like(x, dy.dtype)
    if x.size == dy.size:
        return _product(dy, other, dx)
    sizes, to_other, to_dx = shapes.product_axes(*_in_memory(dy, other, x))
    across = sizes[2] if to_dx[2] or sizes[2] == 1 else 1  # neighbours that a block computes
    tile = min(across, THREADS)
    rows = (sizes[0] if to_dx[0] else 1) * (sizes[1] if to_dx[1] else 1)
    grid = dy.dims[0] * LANES * rows * -(-across // tile)
    arguments = dy, other, dx, tile, *sizes, *to_other, *to_dx
    launching.launch("multiply_dx", grid, THREADS, *arguments, defines={"WIDTH": 1})
    return dx


def scale_channels(x, factor):
    _check_factors(factor, x)
    y, width = array.empty_like(x), 4 if x.dims[1] % 4 == 0 else 1
    blocks = launching.blocks_of_threads(x.size // width)
    arguments = x, factor, y, x.size // width, x.dims[1]
    launching.launch("scale_channels", blocks, THREADS, *arguments, defines={"WIDTH": width})
    return y


def _check_factors(factor, x):
    if factor.size != x.dims[1]:
        raise ValueError(
            f"scale: on a GPU, expected one factor per channel of {x}, got {factor.size}: scale "
            "before flattening"
        )


def scale_channels_dfactor(dy, x, tree):
    dy = batchnorm.cotangent_like(dy, x)
    (count, tiles), numbers = batchnorm.division(x)
    leaves = launching.empty((count, x.dims[1]), np.float32)
    defines = {"WIDTH": 4 if x.dims[1] % 4 == 0 else 1}
    arguments = dy, x, leaves, *numbers
    launching.launch("scale_dfactor", (count, tiles), THREADS, *arguments, defines=defines)
    return partial_of_leaves(leaves, tree, LANES // numbers[0])
