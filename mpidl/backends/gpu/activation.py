"""Compute activation functions with the kernels in activations.cu and batchnorm.cu (ReLU)."""

import math

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.batchnorm import channel_sums, cotangent_like
from mpidl.core.blocks import LANES

THREADS = 256  # threads per CUDA block, as in both .cu files


def _by_element(name, *arrays, scale=()):
    """Launch the elementwise kernel activation_NAME, and return its output.

    `scale` holds the additional scalar arguments of the kernel. Raise ValueError if the arrays
    differ in memory layout.
    """
    x = arrays[-1]
    if any((a.dims, a.order) != (x.dims, x.order) for a in arrays):
        raise ValueError(f"{name}: expected arrays of the same memory layout, got {arrays}")
    y = array.empty_like(x)
    blocks = min(-(-x.size // (4 * THREADS)), 16 * launching.device().processors)
    launching.launch(f"activation_{name}", blocks, THREADS, *arrays, y, *scale, x.size)
    return y


def _elements(x):
    return min(-(-x.size // (4 * THREADS)), 16 * launching.device().processors)


def relu(x):
    y = array.empty_like(x)
    launching.launch("relu", _elements(x), THREADS, x, y, x.size)
    return y


def relu_dx(dy, y):
    dx = array.empty_like(y)
    launching.launch("relu_dx", _elements(y), THREADS, cotangent_like(dy, y), y, dx, y.size)
    return dx


def leaky_relu(x, scale):
    return _by_element("leaky", x, scale=(scale,))


def leaky_relu_dx(dy, y, scale):
    return _by_element("leaky_dx", dy, y, scale=(scale,))


def tanh(x):
    # the error is at most 2 ulp
    return _by_element("tanh", x)


def tanh_dx(dy, y):
    return _by_element("tanh_dx", dy, y)


def sigmoid(x):
    # the error is at most 2.5 ulp
    return _by_element("sigmoid", x)


def sigmoid_dx(dy, y):
    return _by_element("sigmoid_dx", dy, y)


def gelu(x, approximate):
    # the error is at most 2.5 ulp, or 3 ulp for the tanh approximation
    return _by_element("gelu" if approximate == "none" else "gelu_tanh", x)


def gelu_dx(dy, x, approximate):
    return _by_element("gelu_dx" if approximate == "none" else "gelu_tanh_dx", dy, x)


def swish(x):
    # the error is at most 3.5 ulp
    return _by_element("swish", x)


def swish_dx(dy, x):
    return _by_element("swish_dx", dy, x)


def clip_range(x, low, high):
    return _by_element("clip", x, scale=(low, high))


def clip_range_dx(dy, y, low, high):
    return _by_element("clip_dx", dy, y, scale=(low, high))


def hard_sigmoid(x, alpha, beta):
    return _by_element("hard_sigmoid", x, scale=(alpha, beta))


def hard_sigmoid_dx(dy, y, alpha):
    return _by_element("hard_sigmoid_dx", dy, y, scale=(alpha,))


def hard_swish(x):
    return _by_element("hard_swish", x)


def hard_swish_dx(dy, x):
    return _by_element("hard_swish_dx", dy, x)


def prelu(x, slope):
    return _by_element("prelu", x, scale=_slopes(slope, x))


def prelu_dx(dy, x, slope):
    return _by_element("prelu_dx", dy, x, scale=_slopes(slope, x))


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
    products = _by_element("prelu_products", dy, x)
    if slopes == 1:  # treat each image as a single channel
        products = products.reshape(products.shape)
        products.dims = (len(x), 1, math.prod(x.dims[1:-1]), 1, LANES)
        products.shape, products.order = products.dims, array.IMAGES
    return channel_sums(products, tree)
