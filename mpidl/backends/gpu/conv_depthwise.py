"""Compute depthwise convolutions in float32, with kernels/cuda/conv_depthwise.cu.

In a depthwise convolution, each filter reads the one channel of its number. Each thread of the
kernels multiplies one channel, or four neighbouring ones, so there are no products with zeros
between channels. The kernels run on any GPU. `shape` is the `conv.Shape` of the layer.
"""

from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.backends.gpu.conv_direct import images_per_leaf
from mpidl.core.blocks import LANES

THREADS, PIXELS = 256, 4  # threads per block, and neighbouring pixels of a thread, as in the kernel
TILE = 8  # maximum number of vectors of channels of a block in the weight gradient
LARGEST = 1 << 31  # offsets within an image are C ints
TALL = 8  # maximum number of rows of a thread, which uses the weights in its registers in each row


def suits(shape):
    """Return whether the kernels compute a convolution."""
    of_input = (shape.height + shape.top) * (shape.width + shape.left) * shape.channels
    of_output = shape.out_height * shape.out_width * shape.filters
    is_depthwise = shape.groups == shape.channels == shape.filters > 1
    return is_depthwise and max(of_input, of_output) < LARGEST


def _vector(channels, *arrays):
    """Return the number of channels of a thread, which does not change the bytes of the result."""
    aligned = all(a.offset % (4 * a.dtype.itemsize) == 0 for a in arrays)
    return 4 if channels % 4 == 0 and aligned else 1


def _grid(images, height, width, vectors):
    """Return (blocks of threads, rows of a thread) for pixels of height x width.

    A thread has fewer rows if the grid would not fill the GPU. This does not change the bytes.
    """
    tall, strips = TALL, images * -(-width // PIXELS) * vectors
    while tall > 1 and strips * -(-height // tall) < 4 * THREADS * launching.device().processors:
        tall //= 2
    return -(-strips * -(-height // tall) // THREADS), tall


def forward(x, weight, bias, shape):
    """Return the convolution of x, an Array or a DeferredInput, plus the bias unless it is None."""
    source, (channels, height, width) = batchnorm.operand(x), shape[2:5]
    x = source[0]
    y = array.empty_lanes((len(x), channels, height, width, LANES), x.dtype)
    images, vector = len(x) * LANES, _vector(channels, x)
    grid, tall = _grid(images, height, width, channels // vector)
    arguments = *source, weight, bias, y, images, tall
    defines = {"VECTOR": vector, **shape.definition}
    launching.launch("conv_depthwise", grid, THREADS, *arguments, shape.sizes, defines=defines)
    return y


def dx(dy, x, weight, shape, bias=None):
    """Return the gradient with respect to x, plus the bias. Only the shape of `x` is used."""
    gradient, (height, width, channels) = array.empty_lanes(x.dims, dy.dtype), shape[:3]
    images, vector = len(x) * LANES, _vector(channels, dy)
    grid, tall = _grid(images, height, width, channels // vector)
    arguments = dy, weight, bias, gradient, images, tall, shape.sizes
    defines = {"VECTOR": vector, **shape.definition}
    launching.launch("conv_depthwise_dx", grid, THREADS, *arguments, defines=defines)
    return gradient


def dweight_leaves(dy, x, shape, tree):
    """Return (leaves of the weight gradient, number of leaves per block of 16 images).

    See `conv_direct.dweight_leaves`; x may be a DeferredInput.
    """
    source, channels = batchnorm.operand(x), shape.channels
    fours = -(-channels // 4)
    tile = min(TILE, fours)
    images = images_per_leaf(-(-fours // tile), tree)
    leaves = array.empty((len(dy) * (LANES // images), channels * shape.taps))
    vector = _vector(channels, source[0], dy)
    grid = len(leaves) * -(-(channels // vector) // tile)
    arguments = dy, *source, leaves, images, tile, shape.sizes
    defines = {"VECTOR": vector, **shape.definition}
    launching.launch("conv_depthwise_dweight", grid, THREADS, *arguments, defines=defines)
    return leaves, LANES // images
