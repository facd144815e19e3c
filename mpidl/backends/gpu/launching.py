"""Arrays in device memory, and the sink of launches: a kernel runs at once or is recorded.

Functions of the backend use this module alone: `empty`, `launch`, `scalar`, `constant`, `table`. A
process opens one device; `through` puts a Recorder (see `recorder`) in place of the Eager sink.
"""

import contextlib
import math

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.gpu import kernels
from mpidl.device_array import DeviceArray

ALIGNED = 256  # bytes, as cudaMalloc aligns
LARGE = 1 << 20  # words of 4 bytes from which on a kernel makes zeros

THREADS = 256  # of a block of the kernels of elementwise.cu
WORD = 4  # bytes that are copied or set to zero at a time
KINDS = {"f4": "float", "f8": "double"}

_device = None  # the Device of this process, once it is opened
_sink = None  # of launches: Eager or a Recorder


class Block:
    """Memory of the device with one owner; it is given back with the last Array in it.

    `owner` is an object that keeps the memory until then.
    """

    def __init__(self, address, nbytes, give_back=None, owner=None):
        self.address, self.nbytes, self.owner = address, nbytes, owner
        self._give_back = give_back

    def __del__(self):
        if self._give_back is not None:
            self._give_back(self.address, self.nbytes)


class Array(DeviceArray):
    """Memory on the device, seen in a shape. `array` says how memory orders it.

    Attributes
    ----------
    buffer : Block or Planned
        Keeps the memory. Its `address` is None while a program is being recorded.
    offset : int
        Bytes from the start of the buffer.
    shape, dims, order : tuple
        The shape that every backend uses, and the axes and their order in memory.
    bounds : array.Bounds or None
        Of labels.
    """

    __slots__ = ("buffer", "offset", "dtype", "shape", "dims", "order", "bounds")

    def __init__(self, buffer, dtype, shape, dims=None, order=None, offset=0):
        self.buffer, self.offset, self.dtype = buffer, offset, np.dtype(dtype)
        self.shape = tuple(shape)
        self.dims = self.shape if dims is None else tuple(dims)
        self.order = tuple(range(len(self.dims))) if order is None else tuple(order)
        self.bounds = None  # of labels: a Bounds

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
        """Return the same memory in another shape; nothing moves."""
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if math.prod(shape) != self.size:
            raise ValueError(f"cannot reshape {self.shape} to {shape}")
        view = Array(self.buffer, self.dtype, shape, self.dims, self.order, self.offset)
        if self.order == tuple(range(len(self.dims))):
            view.dims, view.order = view.shape, tuple(range(len(shape)))
        return view

    def row(self, i):
        """Return row i of an Array in C order."""
        shape = self.shape[1:]
        step = math.prod(shape) * self.dtype.itemsize
        return Array(self.buffer, self.dtype, shape, offset=self.offset + i * step)

    def part(self, start, shape):
        """Return `shape` elements from element `start` of an Array in C order."""
        offset = self.offset + start * self.dtype.itemsize
        return Array(self.buffer, self.dtype, shape, offset=offset)

    def numpy(self):
        """Return a copy in host memory, in C order; waits for the device."""
        raw = download(self)
        inverse = np.argsort(self.order)
        raw = raw.reshape([self.dims[axis] for axis in self.order]).transpose(inverse)
        return np.ascontiguousarray(raw).reshape(self.shape)

    def __array__(self, dtype=None, copy=None):
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __float__(self):
        return float(self.numpy().reshape(()))

    def astype(self, dtype):
        """Return this Array if it has the type, else a float64 Array rounded to float32."""
        if self.dtype == dtype:
            return self
        if (self.dtype, np.dtype(dtype)) != (np.float64, np.float32):
            raise TypeError(f"no kernel makes {np.dtype(dtype)} of {self}")
        y = empty_like(self, dtype)
        launch("cast_double_float", blocks_of_threads(self.size), THREADS, self, y, self.size)
        return y

    def __add__(self, other):
        if not isinstance(other, Array):
            return NotImplemented
        a, b = self, other
        if (a.shape, a.dims, a.order, a.dtype) != (b.shape, b.dims, b.order, b.dtype):
            raise ValueError(
                f"cannot add {b} to {a}: they differ in shape, type or order in memory"
            )
        y = empty_like(a)
        launch(f"add_{kind_of(a)}", blocks_of_threads(a.size), THREADS, a, b, y, a.size)
        return y

    def zeros_like(self):
        """Return zeros of the same shape, type and order in memory."""
        words = -(-self.nbytes // WORD)
        zeros = empty((words,), np.int32)
        launch("zero_words", blocks_of_threads(words), THREADS, zeros, words)
        return Array(zeros.buffer, self.dtype, self.shape, self.dims, self.order)

    __array_ufunc__ = None  # NumPy's arithmetic would silently copy it to the host

    def __repr__(self):
        return f"gpu.Array(shape={self.shape}, {self.dtype})"


class Table:
    """Addresses in device memory, for kernels that go through a list of arrays.

    `rows` are lists of Arrays and integers of one length; memory holds (rows, columns) int64.
    """

    dtype = np.dtype("i8")

    def __init__(self, rows, array):
        self.rows, self.array = rows, array

    @property
    def address(self):
        return self.array.address

    @property
    def arrays(self):
        """The Arrays that the table points to."""
        return [value for row in self.rows for value in row if isinstance(value, Array)]

    def filled(self):
        """Return the table as integers; all addresses must be known."""
        return np.array(
            [[v.address if isinstance(v, Array) else int(v) for v in row] for row in self.rows],
            np.int64,
        )


class Eager:
    """The sink that launches at once, on the device's one stream.

    Memory comes from an arena and returns to it with the last reference; the order of the stream
    makes that safe.
    """

    def __init__(self, device):
        self.device = device
        self.arena = arenas.Arena(self._region)

    def _region(self, nbytes):
        owner = self.device.allocate(nbytes)
        return owner, owner.address, nbytes

    def empty(self, nbytes):
        size = -(-max(nbytes, 1) // ALIGNED) * ALIGNED
        returned = self.arena.returned
        return Block(self.arena.take(size), size, lambda *place: returned.append(place))

    def launch(self, launch):
        self.device.launch(load(launch), launch)

    def scalar(self, name, value, dtype):
        return self._uploaded(np.atleast_1d(np.asarray(value, dtype)))

    def _uploaded(self, value):
        y = Array(self.empty(value.nbytes), value.dtype, value.shape)
        self.device.upload(y.address, value)
        return y

    def exchange(self, world, tree, matrix, combine):
        """Return the root of all ranks' nodes (nodes of this rank, width), (width,)."""
        nodes = download(matrix).reshape(matrix.shape)
        return self._uploaded(np.ascontiguousarray(world.exchange(tree, nodes, combine)))

    def between(self, mover, source, target):
        """Gather the rows of `source` of all ranks in `target`."""
        mover.allgather(source, target)

    def table(self, rows):
        table = Table(rows, None)
        table.array = self._uploaded(table.filled())
        return table


def open(device):
    """Compute on this Device from now on, and return it; None ends the use of a device."""
    global _device, _sink
    _device, _sink = device, None if device is None else Eager(device)
    _constants.clear()
    _loaded.clear()
    return device


def device():
    """Return the Device of this process. Raises RuntimeError if none was opened."""
    if _device is None:
        raise RuntimeError("no GPU is in use: world.use_device('gpu') takes one")
    return _device


def sink():
    """Return the current sink of launches."""
    return _sink


@contextlib.contextmanager
def through(other):
    """Hand launches to another sink within the block."""
    global _sink
    before, _sink = _sink, other
    try:
        yield other
    finally:
        _sink = before


def empty(shape, dtype=np.float32):
    """Return an uninitialized Array in C order."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return Array(_sink.empty(nbytes), dtype, shape)


def empty_like(array, dtype=None):
    """Return an uninitialized Array of the same shape and order in memory."""
    y = empty(array.dims, array.dtype if dtype is None else dtype)
    y.shape, y.order = array.shape, array.order
    return y


def blocks_of_threads(elements, per_thread=1):
    """Return how many blocks of THREADS to launch for so many elements."""
    return min(-(-elements // (THREADS * per_thread)), 32 * device().processors)


def kind_of(x):
    """Return the type of x as it stands in names of kernels."""
    kind = KINDS.get(x.dtype.str[1:])
    if kind is None:
        raise TypeError(f"expected float32 or float64, got {x}")
    return kind


def launch(name, grid, block, *arguments, shared=0, defines=None):
    """Run a kernel of kernels/cuda: its name, grid, block of threads and arguments."""
    kernel_launch = kernels.make(name, grid, block, arguments, shared, defines)
    if 0 not in kernel_launch.grid:  # an empty share
        _sink.launch(kernel_launch)


def scalar(name, value, dtype=np.float32):
    """Return a number, or a row of numbers, that may change from step to step, as an Array (n,).

    A recorded program reads it from memory under this name, so that replays can change it.
    """
    return _sink.scalar(name, value, np.dtype(dtype))


def table(rows):
    """Return a Table of rows of Arrays and integers."""
    return _sink.table(rows)


_constants: dict = {}  # {(bytes, dtype, shape): Array}
_loaded: dict = {}  # {Unit: {kernel: handle}}


def constant(value):
    """Return a NumPy array's contents on the device, uploaded once for all calls."""
    value = np.ascontiguousarray(value)
    key = (value.tobytes(), value.dtype.str, value.shape)
    if key not in _constants:
        if len(_constants) > 4096:
            _constants.clear()
        _constants[key] = _uploaded(value)
    return _constants[key]


def _fixed(shape, dtype):
    """Return an uninitialized Array at a fixed place, which no program plans."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    owner = device().allocate(max(nbytes, 1))
    return Array(Block(owner.address, nbytes, owner=owner), dtype, shape)


def _uploaded(value):
    y = _fixed(value.shape, value.dtype)
    device().upload(y.address, value)
    return y


def persistent(shape, dtype=np.float32):
    """Return an Array of zeros at a fixed place, which no program plans."""
    zeros = _fixed(shape, dtype)
    words = zeros.nbytes // WORD
    if words < LARGE:
        words = 0
    else:  # a kernel: the host uploads no zeros of the size of a data set
        as_words = Array(zeros.buffer, np.int32, (words,))
        clearing = kernels.make("zero_words", 32 * device().processors, 256, (as_words, words))
        device().launch(load(clearing), clearing)
    rest = np.zeros(zeros.nbytes - WORD * words, np.uint8)
    device().upload(zeros.address + WORD * words, rest)
    return zeros


def upload(array, value):
    """Copy NumPy memory to an Array, byte for byte."""
    if isinstance(array.buffer.address, int):
        device().upload(array.address, np.ascontiguousarray(value))
    else:
        raise RuntimeError("a program that is being recorded cannot take data from the host")


def download(array):
    """Return the Array's memory as a flat NumPy array; waits for the device."""
    if not isinstance(array.buffer.address, int):
        raise RuntimeError(
            "the value is not known while a step is being recorded: do what needs its number on "
            "the host outside of the step, or run it with --graphs off"
        )
    raw = np.empty(array.size, array.dtype)
    device().download(raw, array.address)
    device().synchronize()
    return raw


def load(launch):
    """Return the device's handle of a Launch's kernel, compiled and loaded on first use."""
    if launch.unit not in _loaded:
        _loaded[launch.unit] = device().load(launch.unit)
    return _loaded[launch.unit][launch.name]
