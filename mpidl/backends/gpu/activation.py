"""Launch the activation kernels of activations.cu and the ReLU of batchnorm.cu."""

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.batchnorm import cotangent_like

THREADS = 256  # threads per CUDA block, as in both files


def _by_element(name, *arrays, scale=()):
    """Launch the elementwise kernel activation_`name`, and return its output.

    `scale` holds additional scalar arguments. Raise ValueError if the arrays differ in memory
    layout.
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
