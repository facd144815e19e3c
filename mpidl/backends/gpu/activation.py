"""Compute activation functions with the kernels in activations.cu, prelu.cu and batchnorm.cu."""

import math

import numpy as np

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.batchnorm import add_operands, channel_sums, operand
from mpidl.backends.gpu.join import add_relu_dx
from mpidl.backends.gpu.launching import THREADS
from mpidl.core.blocks import LANES


def elementwise(function, x, *numbers):
    return _function("activation", function, (), x, numbers)


def elementwise_dx(function, dy, value, *numbers):
    return _function("activation_dx", function, (dy,), value, numbers)


def _function(name, function, cotangent, x, numbers):
    """Launch a kernel for a function of x, which may be a NormalizedInput, or its gradient."""
    values, *norm, _, _ = operand(x)
    arguments = *_two(numbers), values.dims[1] if len(values.dims) > 2 else 1
    defines = {"FUNCTION": function}
    return _launched(name, *cotangent, values, norm=norm, arguments=arguments, defines=defines)


def _two(numbers):
    return (*numbers, 0.0, 0.0)[:2]


def _launched(name, *arrays, norm=(), arguments=(), defines=None, dtype=None):
    """Launch a kernel that computes each element from the same elements of arrays.

    The kernel's arguments are the arrays, `norm`, the output, `arguments` and the number of
    elements. The output has the type of the arrays by default. Raise ValueError if the arrays
    differ in memory layout.
    """
    x = arrays[-1]
    if any((a.dims, a.order) != (x.dims, x.order) for a in arrays):
        raise ValueError(f"{name}: expected arrays of the same memory layout, got {arrays}")
    y = array.empty_like(x, dtype)
    blocks, numbers = launching.blocks_of_threads(x.size, per_thread=4), (*arguments, x.size)
    launching.launch(name, blocks, THREADS, *arrays, *norm, y, *numbers, defines=defines)
    return y


def relu(x):
    return add_operands(x, relu=True)


def relu_dx(dy, y):
    return add_relu_dx([dy], y, [None, None], None)[0]


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
