"""Compute depthwise convolutions in float32, with kernels/cuda/conv_depthwise.cu.

In a depthwise convolution, each filter reads the one channel of its number. Each thread of the
kernels multiplies one channel, or four neighbouring ones, so there are no products with zeros
between channels. The kernels run on any GPU.
"""

from mpidl.backends import shapes
from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.backends.gpu.conv_direct import images_per_leaf
from mpidl.core.blocks import LANES

THREADS, PIXELS = 256, 4  # threads per block, and neighbouring pixels of a thread, as in the kernel
TILE = 8  # maximum number of vectors of channels of a block in the weight gradient
LARGEST = 1 << 31  # offsets within an image are C ints
TALL = 8  # maximum number of rows of a thread, which uses the weights in its registers in each row


def suits(shape):
    """Return whether the kernels compute a convolution, given its `conv.Shape`."""
    of_input = (shape.height + shape.top) * (shape.width + shape.left) * shape.channels
    of_output = shape.out_height * shape.out_width * shape.filters
    is_depthwise = shape.groups == shape.channels == shape.filters
    return is_depthwise and max(of_input, of_output) < LARGEST


def _numbers(x, weight, geometry):
    """Return the arguments of all three kernels from `height` on, a tuple of integers."""
    (_, c, h, w, _), (k, _, r, s) = x.dims, weight.dims
    stride, padding, dilation, groups = geometry
    _, p, q = shapes.conv2d_shape((c, h, w), weight.dims, stride, padding, dilation)
    return (h, w, c, p, q, k, r, s, *stride, padding[0][0], padding[1][0], *dilation, groups)


def _vector(channels, *arrays):
    """Return the number of channels of a thread, which does not change the bytes of the result."""
    aligned = all(a.offset % (4 * a.dtype.itemsize) == 0 for a in arrays)
    return 4 if channels % 4 == 0 and aligned else 1


def _definitions(numbers, vector):
    """Return the definitions for compiling the kernels, {name: value}."""
    if getattr(launching.device(), "specialize", False):  # the device compiles a kernel per layer
        return {"VECTOR": vector, "CONV_SHAPE": ",".join(map(str, numbers))}
    return {"VECTOR": vector}


def _grid(images, height, width, vectors):
    """Return (blocks of threads, rows of a thread) for pixels of height x width.

    A thread has fewer rows if the grid would not fill the GPU. This does not change the bytes.
    """
    tall, strips = TALL, images * -(-width // PIXELS) * vectors
    while tall > 1 and strips * -(-height // tall) < 4 * THREADS * launching.device().processors:
        tall //= 2
    return max(1, -(-strips * -(-height // tall) // THREADS)), tall


def forward(x, weight, bias, geometry):
    """Return the convolution of x, an Array or a DeferredInput, plus the bias unless it is None."""
    source = batchnorm.operand(x)
    x, numbers = source[0], _numbers(source[0], weight, geometry)
    channels, height, width = numbers[2:5]
    y = array.empty_lanes((len(x), channels, height, width, LANES), x.dtype)
    images, vector = len(x) * LANES, _vector(channels, x)
    grid, tall = _grid(images, height, width, channels // vector)
    arguments = *source, weight, bias, y, images, tall
    defines = _definitions(numbers, vector)
    launching.launch("conv_depthwise", grid, THREADS, *arguments, *numbers, defines=defines)
    return y


def dx(dy, x, weight, geometry):
    """Return the gradient with respect to x. Only the shape of `x` is used."""
    numbers = _numbers(x, weight, geometry)
    height, width, channels = numbers[:3]
    gradient = array.empty_lanes(x.dims, dy.dtype)
    images, vector = len(x) * LANES, _vector(channels, dy)
    grid, tall = _grid(images, height, width, channels // vector)
    arguments = dy, weight, gradient, images, tall
    defines = _definitions(numbers, vector)
    launching.launch("conv_depthwise_dx", grid, THREADS, *arguments, *numbers, defines=defines)
    return gradient


def dweight_leaves(dy, x, weight, geometry, tree):
    """Return (leaves of the weight gradient, number of leaves per block of 16 images).

    See `conv_direct.dweight_leaves`; x may be a DeferredInput.
    """
    source = batchnorm.operand(x)
    x, numbers = source[0], _numbers(source[0], weight, geometry)
    channels = numbers[2]
    fours = -(-channels // 4)
    tile = min(TILE, fours)
    images = images_per_leaf(-(-fours // tile), tree)
    leaves = array.empty((len(x) * (LANES // images), weight.size))
    vector = _vector(channels, x, dy)
    grid = len(leaves) * -(-(channels // vector) // tile)
    arguments, defines = (dy, *source, leaves, images, tile), _definitions(numbers, vector)
    launching.launch("conv_depthwise_dweight", grid, THREADS, *arguments, *numbers, defines=defines)
    return leaves, LANES // images
