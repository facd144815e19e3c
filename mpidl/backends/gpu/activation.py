"""Compute activation functions with the kernels in activations.cu, prelu.cu and batchnorm.cu."""

import math

import numpy as np

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.batchnorm import channel_sums, cotangent_like
from mpidl.core.blocks import LANES

THREADS = 256  # threads per CUDA block, as in the .cu files


def elementwise(function, x, *numbers):
    return _launched("activation", x, arguments=_two(numbers), defines={"FUNCTION": function})


def elementwise_dx(function, dy, value, *numbers):
    defines = {"FUNCTION": function}
    return _launched("activation_dx", dy, value, arguments=_two(numbers), defines=defines)


def _two(numbers):
    return (*numbers, 0.0, 0.0)[:2]


def _launched(name, *arrays, arguments=(), defines=None, dtype=None):
    """Launch a kernel that computes each element from the same elements of arrays.

    `arguments` are the kernel's arguments between the output and the number of elements. The output
    has the type of the arrays by default. Raise ValueError if the arrays differ in memory layout.
    """
    x = arrays[-1]
    if any((a.dims, a.order) != (x.dims, x.order) for a in arrays):
        raise ValueError(f"{name}: expected arrays of the same memory layout, got {arrays}")
    y = array.empty_like(x, dtype)
    numbers = *arrays, y, *arguments, x.size
    launching.launch(name, _blocks(x), THREADS, *numbers, defines=defines)
    return y


def _blocks(x):
    return min(-(-x.size // (4 * THREADS)), 16 * launching.device().processors)


def relu(x):
    y = array.empty_like(x)
    launching.launch("relu", _blocks(x), THREADS, x, y, x.size)
    return y


def relu_dx(dy, y):
    dx = array.empty_like(y)
    launching.launch("relu_dx", _blocks(y), THREADS, cotangent_like(dy, y), y, dx, y.size)
    return dx


def prelu(x, slope):
    return _launched("prelu", x, arguments=_slopes(slope, x))


def prelu_dx(dy, x, slope):
    return _launched("prelu_dx", dy, x, arguments=_slopes(slope, x))


def _slopes(slope, x):
    """Return the slopes and their number as arguments of a kernel.

    Raise ValueError unless there is one slope, or one per channel that x has in memory.
    """
    if slope.size not in (1, x.dims[1]):
        raise ValueError(
            f"prelu: on a GPU, expected one slope per channel of {x}, got {slope.size} slopes: "
            "apply prelu before flattening"
        )
    return slope, slope.size


def prelu_dslope(dy, x, slopes, tree):
    products = _launched("prelu_products", dy, x, dtype=np.float32)
    if slopes == 1:  # treat each image as a single channel
        products = products.reshape(products.shape)
        products.dims = (len(x), 1, math.prod(x.dims[1:-1]), 1, LANES)
        products.shape, products.order = products.dims, array.IMAGES
    return channel_sums(products, tree)
