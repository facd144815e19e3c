"""Create arrays in device memory, and pass kernels to a launch sink that runs or records them.

The functions of the GPU backend use the device only through this module: `empty`, `launch`,
`scalar`, `constant` and `table`. A process opens one device. The default launch sink, Eager, runs
kernels at once. `through` replaces Eager by another sink, such as a Recorder (see `recorder`).
"""

import contextlib
import math
from typing import Any

import numpy as np

from mpidl.backends import settings
from mpidl.backends.cpu import arenas
from mpidl.backends.gpu import kernels
from mpidl.core.values import BF16, DeviceArray

ALIGNED = 256  # bytes: the alignment of cudaMalloc
LARGE = 1 << 20  # words of 4 bytes; a kernel zeroes new arrays of at least this size

THREADS = 256  # threads per block of elementwise kernels
WORD = 4  # bytes; memory is copied and set to zero word by word
KINDS = {"f4": "value", "f8": "double", "V2": "value"}  # `value` of common.cuh
CASTS = {
    (np.dtype(np.float32), np.dtype(np.float64)): "cast_float_double",
    (np.dtype(np.float64), np.dtype(np.float32)): "cast_double_float",
    (np.dtype(np.float32), BF16): "cast_float_value",
    (BF16, np.dtype(np.float32)): "cast_value_float",
}


class Process:
    """The device of this process, the current launch sink, and what is loaded on the device."""

    def __init__(self):
        self.open(None)

    def open(self, device):
        self.device, settings.on_gpu = device, device is not None
        self.sink: Any = None if device is None else Eager(device)
        self.constants = {}  # {(bytes, dtype, shape): Array}
        self.loaded = {}  # {Unit: {kernel: handle}}


process = Process()


class Block:
    """A range of device memory, which is released when the last Array that uses it is deleted.

    `owner` is an object that keeps the memory allocated until then, or None.
    """

    def __init__(self, address, nbytes, give_back=None, owner=None):
        self.address, self.nbytes, self.owner = address, nbytes, owner
        self._give_back = give_back

    def __del__(self):
        if self._give_back is not None:
            self._give_back(self.address, self.nbytes)


class Array(DeviceArray):
    """An array in device memory. The module `array` describes the memory orders.

    The Array begins `offset` bytes after the beginning of `buffer`, which is a Block or a Planned;
    a Planned has no address while a program is being recorded. `shape` is the shape that every
    backend uses. In memory, the Array has the shape `dims`, whose axes `order` lists from the
    slowest to the fastest. `bounds` are the `array.Bounds` of labels, else None. `positive` is an
    Array for the result of a ReLU, or None: a byte for each four elements in memory, with a bit for
    each element that is > 0.
    """

    __slots__ = (
        *("buffer", "offset", "dtype", "shape", "dims", "order"),
        *("bounds", "positive", "padded"),
    )

    def __init__(self, buffer, dtype, shape, dims=None, order=None, offset=0):
        self.buffer, self.offset, self.dtype = buffer, offset, np.dtype(dtype)
        self.shape = tuple(shape)
        self.dims = self.shape if dims is None else tuple(dims)
        self.order = tuple(range(len(self.dims))) if order is None else tuple(order)
        self.bounds: Any = None
        self.positive: Any = None
        self.padded: Any = None

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
        """Return an Array with another shape that uses the same memory."""
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if math.prod(shape) != self.size:
            raise ValueError(f"cannot reshape {self.shape} to {shape}")
        view = Array(self.buffer, self.dtype, shape, self.dims, self.order, self.offset)
        if self.order == tuple(range(len(self.dims))):
            view.dims, view.order = view.shape, tuple(range(len(shape)))
        return view

    def row(self, i):
        """Return row i, without a copy. This Array must be in C order."""
        shape = self.shape[1:]
        step = math.prod(shape) * self.dtype.itemsize
        return Array(self.buffer, self.dtype, shape, offset=self.offset + i * step)

    def part(self, start, shape):
        """Return an Array of `shape` that uses the memory from element `start` on.

        This Array must be in C order.
        """
        offset = self.offset + start * self.dtype.itemsize
        return Array(self.buffer, self.dtype, shape, offset=offset)

    def numpy(self):
        """Wait for the device, and return a copy as a NumPy array in C order."""
        raw = download(self)
        inverse = np.argsort(self.order)
        raw = raw.reshape([self.dims[axis] for axis in self.order]).transpose(inverse)
        return np.ascontiguousarray(raw).reshape(self.shape)

    def __array__(self, dtype=None, copy=None):
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __float__(self):
        return float(self.numpy().reshape(()))

    def astype(self, dtype):
        """Return this Array with the given dtype.

        Raise TypeError unless one of the two types is float32 and the other float64 or bfloat16.
        """
        if self.dtype == dtype:
            return self
        if (self.dtype, np.dtype(dtype)) not in CASTS:
            raise TypeError(f"no kernel converts {self} to {np.dtype(dtype)}")
        y, kernel = empty_like(self, dtype), CASTS[self.dtype, np.dtype(dtype)]
        launch(kernel, blocks_of_threads(self.size), THREADS, self, y, self.size)
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
        blocks = blocks_of_threads(a.size, per_thread=4)
        launch(f"add_{kind_of(a)}", blocks, THREADS, a, b, y, a.size)
        return y

    def zeros_like(self):
        """Return an Array of zeros with the same shape, type and order in memory."""
        words = -(-self.nbytes // WORD)
        zeros = empty((words,), np.int32)
        launch("zero_words", blocks_of_threads(words), THREADS, zeros, words)
        return Array(zeros.buffer, self.dtype, self.shape, self.dims, self.order)

    __array_ufunc__ = None  # NumPy's arithmetic would silently copy the Array to the host

    def __repr__(self):
        return f"gpu.Array(shape={self.shape}, {self.dtype})"


class Table:
    """A table of addresses and integers in device memory, for kernels that process many arrays.

    `rows` is a list of equally long lists of Arrays, integers and None, whose address is 0. `array`
    is an int64 Array (rows, columns) that contains the integers and the addresses of the Arrays.
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
        """Return the table as a NumPy array of int64; all addresses must be known."""
        return np.array(
            [
                [v.address if isinstance(v, Array) else int(v or 0) for v in row]
                for row in self.rows
            ],
            np.int64,
        )


class Rows:
    """Rows of a kernel's table, which one launch processes: blocks with blockIdx.y = i take row i.

    The table is the kernel's only argument. A launch has equally many blocks for each row, at most
    as many as the row that can use most, so the kernel divides a row's work by gridDim.x.
    `results` has the Arrays that each row writes.
    """

    def __init__(self, name, block, defines=None):
        self.name, self.block, self.defines = name, block, defines or {}
        self.rows, self.results, self.blocks = [], [], 0

    @property
    def key(self):
        return self.name, self.block, tuple(sorted(self.defines.items()))

    @property
    def arrays(self):
        return [value for row in self.rows for value in row if isinstance(value, Array)]

    @property
    def buffers(self):
        return {id(array.buffer) for array in self.arrays}

    @property
    def computed(self):
        """The buffers of the results."""
        return {id(array.buffer) for results in self.results for array in results}

    def add(self, rows, results, blocks):
        """Add rows that can use up to `blocks` blocks each."""
        self.rows += rows
        self.results += results
        self.blocks = max(self.blocks, blocks)
        return self

    def as_launch(self):
        """Return the Launch of all rows."""
        grid = min(self.blocks, -(-32 * device().processors // len(self.rows))), len(self.rows)
        return kernels.make(self.name, grid, self.block, (table(self.rows),), defines=self.defines)

    def launch(self):
        process.sink.launch(self.as_launch())


class Eager:
    """The launch sink that runs kernels at once, in the device's compute stream.

    Memory comes from an arena. The arena can reuse the memory of an Array as soon as the last
    reference to the Array is deleted, because the stream runs the launches in order.
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

    def before_step(self, rows):
        rows.launch()

    def later(self, rows):
        rows.launch()

    def take(self, name, result):
        return None  # no row waits

    def scalar(self, name, value, dtype):
        return self._uploaded(np.atleast_1d(np.asarray(value, dtype)))

    def _uploaded(self, value):
        y = Array(self.empty(value.nbytes), value.dtype, value.shape)
        self.device.upload(y.address, value)
        return y

    def operate(self, operation, arrays):
        operation.play(self.device)

    def host_array(self, shape, dtype):
        return np.empty(shape, dtype)  # allocating pinned memory would wait for the device

    def table(self, rows):
        table = Table(rows, None)
        table.array = self._uploaded(table.filled())
        return table


def open(device):
    """Make this process use a device, and return the device. With None, use no device."""
    process.open(device)
    return device


def device():
    """Return the device of this process. Raise RuntimeError if no device was opened."""
    if process.device is None:
        raise RuntimeError("no GPU is in use: call world.use_device('gpu') first")
    return process.device


def sink():
    """Return the current launch sink."""
    return process.sink


@contextlib.contextmanager
def through(other):
    """Use another launch sink within the `with` block."""
    before, process.sink = process.sink, other
    try:
        yield other
    finally:
        process.sink = before


def empty(shape, dtype=np.float32):
    """Return an uninitialized Array in C order."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return Array(process.sink.empty(nbytes), dtype, shape)


def empty_like(array, dtype=None):
    """Return an uninitialized Array of the same shape and order in memory."""
    y = empty(array.dims, array.dtype if dtype is None else dtype)
    y.shape, y.order = array.shape, array.order
    return y


def blocks_of_threads(elements, per_thread=1):
    """Return the number of blocks of THREADS threads to launch, at most 32 per multiprocessor."""
    return min(-(-elements // (THREADS * per_thread)), 32 * device().processors)


def kind_of(x):
    """Return the type of x as it appears in kernel names: "value" or "double"."""
    kind = KINDS.get(x.dtype.str[1:])
    if kind is None:
        raise TypeError(f"expected float32, bfloat16 or float64, got {x}")
    return kind


def launch(name, grid, block, *arguments, shared=0, defines=None):
    """Launch a kernel of kernels/cuda through the current sink.

    `grid` is the number of thread blocks, and `block` the number of threads per block. `shared` is
    the size of dynamic shared memory in bytes. `defines` are preprocessor definitions,
    {name: value}.
    """
    kernel_launch = kernels.make(name, grid, block, arguments, shared, defines)
    if 0 not in kernel_launch.grid:  # the grid is empty if this rank has no images
        process.sink.launch(kernel_launch)


def before_step(name, row, blocks, block, defines=None):
    """Launch a kernel for a row of its table, at the start of the step if a step is recorded.

    All such rows of a kernel go out in one launch (see `Rows`), for example to transpose the
    weights of all layers. The results in a row need Arrays of their own, which nothing has used
    yet. If the step has computed a source, the row is launched at once. A step must not write to a
    source that lies outside its memory, except by `Recorder.store`.
    """
    process.sink.before_step(Rows(name, block, defines).add([row], [()], blocks))


def later(name, row, results, blocks, block, defines=None):
    """Launch a kernel for a row of its table, in a recorded step as late as possible.

    All rows of a kernel that wait go out in one launch (see `Rows`), as soon as the step uses one
    of their results or overwrites one of their sources, or at its end. `results` are the Arrays of
    the row that the kernel writes.
    """
    if blocks:
        process.sink.later(Rows(name, block, defines).add([row], [results], blocks))


def take(name, result):
    """Return the waiting row of a kernel that computes only `result`, or None; drop the row.

    The caller must then compute the result by itself.
    """
    return process.sink.take(name, result)


def scalar(name, value, dtype=np.float32):
    """Return scalars that may change between training steps, as an Array (n,).

    Each replay of a recorded program can set the scalars by this name.
    """
    return process.sink.scalar(name, value, np.dtype(dtype))


def table(rows):
    """Return a Table. `rows` contains Arrays and integers."""
    return process.sink.table(rows)


def constant(value):
    """Return an Array with the contents of a NumPy array. Equal contents are uploaded only once."""
    value = np.ascontiguousarray(value)
    key = (value.tobytes(), value.dtype.str, value.shape)
    constants = process.constants
    if key not in constants:
        if len(constants) > 4096:
            constants.clear()
        constants[key] = _uploaded(value)
    return constants[key]


def _fixed(shape, dtype):
    """Return an uninitialized Array at a fixed address, outside the memory of any program."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    owner = device().allocate(max(nbytes, 1))
    return Array(Block(owner.address, nbytes, owner=owner), dtype, shape)


def _uploaded(value):
    y = _fixed(value.shape, value.dtype)
    device().upload(y.address, value)
    if device().is_aside:
        device().synchronize()  # kernels in the other stream may read it too
    return y


def persistent(shape, dtype=np.float32):
    """Return an Array of zeros at a fixed address, outside the memory of any program."""
    zeros = _fixed(shape, dtype)
    words = zeros.nbytes // WORD
    if words < LARGE:
        words = 0
    else:  # a kernel writes the zeros, to avoid a large upload from the host
        as_words = Array(zeros.buffer, np.int32, (words,))
        clearing = kernels.make("zero_words", 32 * device().processors, 256, (as_words, words))
        device().launch(load(clearing), clearing)
    rest = np.zeros(zeros.nbytes - WORD * words, np.uint8)
    device().upload(zeros.address + WORD * words, rest)
    return zeros


def upload(array, value):
    """Copy the bytes of a NumPy array to an Array of the same size.

    Raise RuntimeError if the Array has no address yet because a program is being recorded.
    """
    if isinstance(array.buffer.address, int):
        device().upload(array.address, np.ascontiguousarray(value))
    else:
        raise RuntimeError("a program cannot copy data from the host while it is recorded")


def download(array):
    """Wait for the device, and return the Array's memory as a flat NumPy array.

    Raise RuntimeError if the Array has no address yet because a program is being recorded.
    """
    if not isinstance(array.buffer.address, int):
        raise RuntimeError(
            "the value is not available on the host while a step is recorded: use it outside "
            "the step, or run with --graphs off"
        )
    raw = np.empty(array.size, array.dtype)
    device().download(raw, array.address)
    device().synchronize()
    return raw


def load(launch):
    """Return the device's handle of a Launch's kernel. The first use compiles and loads it."""
    loaded = process.loaded
    if launch.unit not in loaded:
        loaded[launch.unit] = device().load(launch.unit)
    return loaded[launch.unit][launch.name]
