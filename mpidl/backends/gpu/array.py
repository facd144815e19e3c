"""Arrays on a GPU: where they lie, what shape the rest of mpidl sees, how memory orders them.

An Array has no arithmetic: what computes with it is a kernel of ours. Its `shape` is the one that
every backend uses; `dims` and `order` say how it lies in memory, which is the GPU's own affair:

    value            shape                 dims                   order in memory
    images           (blocks, C, H, W, 16) the same               blocks, 16, H, W, C  (NHWC)
    flattened        (blocks, C*H*W, 16)   (blocks, C, H, W, 16)  as before: nothing moves
    filters          (K, C, R, S)          the same               K, R, S, C           (KRSC)
    dense weights    (K, C*H*W)            (K, C, H, W)           K, H, W, C
    anything else    (...)                 the same               C order
"""

import math

import numpy as np

from mpidl.blocks import LANES

IMAGES = (0, 4, 2, 3, 1)  # of (blocks, C, H, W, 16): as memory orders them
VALUES = (0, 2, 1)  # of (blocks, F, 16)
FILTERS = (0, 2, 3, 1)  # of (K, C, R, S)
PART = 64  # floats: where one of several arrays in one piece of memory may begin


def order_of_lanes(dims):
    """How lanes of these dims, (blocks, *image_shape, 16), lie in memory."""
    return {5: IMAGES, 3: VALUES}.get(len(dims), (0, len(dims) - 1, *range(1, len(dims) - 1)))


class Array:
    """Memory on the device, seen in a shape.

    buffer: has `address` (None while a program is being recorded), and keeps the memory; offset:
    bytes into it.
    """

    __slots__ = ("buffer", "offset", "dtype", "shape", "dims", "order", "bounds")

    def __init__(self, buffer, dtype, shape, dims=None, order=None, offset=0):
        self.buffer, self.offset, self.dtype = buffer, offset, np.dtype(dtype)
        self.shape = tuple(shape)
        self.dims = self.shape if dims is None else tuple(dims)
        self.order = tuple(range(len(self.dims))) if order is None else tuple(order)
        self.bounds = None  # of labels: a Bounds

    @property
    def backend(self):
        """The module whose functions take such arrays: see `backends.of`."""
        from mpidl.backends.gpu import functions

        return functions

    @property
    def address(self):
        return self.buffer.address + self.offset

    @property
    def size(self):
        return math.prod(self.dims)

    @property
    def nbytes(self):
        return self.size * self.dtype.itemsize

    @property
    def ndim(self):
        return len(self.shape)

    def __len__(self):
        return self.shape[0]

    def reshape(self, *shape):
        """The same memory in another shape; nothing moves, so memory keeps its order."""
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if math.prod(shape) != self.size:
            raise ValueError(f"cannot reshape {self.shape} to {shape}")
        found = Array(self.buffer, self.dtype, shape, self.dims, self.order, self.offset)
        if self.order == tuple(range(len(self.dims))):
            found.dims, found.order = found.shape, tuple(range(len(shape)))
        return found

    def row(self, i):
        """Row i of an array in C order, as an Array of its own."""
        shape = self.shape[1:]
        step = math.prod(shape) * self.dtype.itemsize
        return Array(self.buffer, self.dtype, shape, offset=self.offset + i * step)

    def part(self, start, shape):
        """`shape` elements from element `start` on of an array in C order."""
        at = self.offset + start * self.dtype.itemsize
        return Array(self.buffer, self.dtype, shape, offset=at)

    def numpy(self):
        """A copy in host memory, in C order and of this shape; waits for the device."""
        from mpidl.backends.gpu import launching

        raw = launching.download(self)
        inverse = np.argsort(self.order)
        raw = raw.reshape([self.dims[axis] for axis in self.order]).transpose(inverse)
        return np.ascontiguousarray(raw).reshape(self.shape)

    def __array__(self, dtype=None, copy=None):
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __float__(self):
        return float(self.numpy().reshape(()))

    def astype(self, dtype):
        """This Array where it is of that type already, else a converted copy."""
        from mpidl.backends.gpu.elementwise import cast

        return self if self.dtype == dtype else cast(self, dtype)

    def __add__(self, other):
        from mpidl.backends.gpu.elementwise import add

        return add(self, other) if isinstance(other, Array) else NotImplemented

    __array_ufunc__ = None  # NumPy's arithmetic would copy it to the host unseen

    def __repr__(self):
        return f"gpu.Array(shape={self.shape}, {self.dtype})"


class Bounds:
    """The least and the largest of whole numbers on the device, which the host alone can look at.

    known: (least, largest); None where they are those of each mini-batch to come, in a step that is
    recorded before there is one.
    """

    def __init__(self, known=None):
        self.known, self.checks = known, []

    def hold(self, check):
        """check(least, largest), which raises where they cannot be: now, or at each `say`."""
        if self.known is None:
            self.checks.append(check)
        else:
            check(*self.known)

    def say(self, least, largest):
        """What they are in a mini-batch."""
        for check in self.checks:
            check(least, largest)


def in_memory(array, dims, order):
    """A NumPy array as memory orders it: C-contiguous in that order."""
    return np.ascontiguousarray(np.reshape(array, dims).transpose(order))


def empty(shape, dtype=np.float32):
    """An Array in C order whose contents are not known."""
    from mpidl.backends.gpu import launching

    return launching.empty(tuple(shape), dtype)


def empty_lanes(shape, dtype=np.float32):
    """The same for a value per image: shape (blocks, *image_shape, 16)."""
    from mpidl.backends.gpu import launching

    made = launching.empty(tuple(shape), dtype)
    made.order = order_of_lanes(made.dims)
    return made


def empty_like(array, dtype=None):
    """An Array of the same shape that lies in memory in the same order."""
    from mpidl.backends.gpu import launching

    made = launching.empty(array.dims, array.dtype if dtype is None else dtype)
    made.shape, made.order = array.shape, array.order
    return made


def lanes(array):
    """Upload a value per image, (blocks, *image_shape, 16)."""
    array = np.asarray(array)
    if array.shape[-1] != LANES:
        raise ValueError(f"expected (blocks, ..., {LANES}) lanes, got {array.shape}")
    return _upload(array, array.shape, order_of_lanes(array.shape))


def filters(array, image_shape=None):
    """Upload weights: (K, C, R, S), or (K, F) that go with images of `image_shape`."""
    array = np.asarray(array)
    return _upload(array, *layout_of_weights(array.shape, image_shape))


def layout_of_weights(shape, image_shape=None):
    """(dims, order) of weights: see `filters`."""
    if len(shape) == 2 and image_shape is not None and len(image_shape) == 3:
        shape = (shape[0], *image_shape)
    return shape, FILTERS if len(shape) == 4 else tuple(range(len(shape)))


def plain(array):
    """Upload an array in C order."""
    array = np.asarray(array)
    return _upload(array, array.shape, range(array.ndim))


def placed(value, like):
    """Upload a NumPy array of the shape of `like`, to lie in memory as that does."""
    return _upload(np.asarray(value, like.dtype), like.dims, like.order)


def together(arrays, image_shapes):
    """Upload {name: float32 array} into one piece of memory; {name: Array}.

    image_shapes: {name: shape of the images that a weight goes with}, see `filters`.
    """
    from mpidl.backends.gpu import launching

    places, at = {}, 0
    for name, value in arrays.items():
        value = np.asarray(value, np.float32)
        places[name] = at, value, *layout_of_weights(value.shape, image_shapes.get(name))
        at += -(-value.size // PART) * PART
    whole = launching.persistent((at,))
    found = {}
    for name, (start, value, dims, order) in places.items():
        array = whole.part(start, value.shape)
        array.dims, array.order = dims, order
        launching.upload(array, in_memory(value, dims, order))
        found[name] = array
    return found


def _upload(array, dims, order):
    from mpidl.backends.gpu import launching

    made = launching.empty(tuple(dims), array.dtype)
    made.shape, made.order = array.shape, tuple(order)
    launching.upload(made, in_memory(array, dims, made.order))
    return made
