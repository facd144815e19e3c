"""Emulate a GPU for tests: a Device on the CPU that runs the kernels of kernels/cuda.

g++ compiles the kernels (compiler.py), which run thread by thread (shim.h). The emulator detects
errors of kernels. Memory starts as NaN. A write just outside an allocation, or a pointer outside
every allocation, raises an error, and so do a misaligned access and an overflow of a signed integer
(checks.h). A background copy arrives only when a stream waits for it.
"""

import bisect
import collections
import contextlib
import ctypes
import functools
import itertools
import mmap
import threading
import time
import weakref

import numpy as np

from emulator import compiler
from mpidl.backends.gpu import kernels, launching

GUARD = 1024  # bytes before and after each allocation that no kernel may write
ALIGNED = 256
Size = ctypes.c_uint * 3
# Types of the arguments of shim::launch: values, grid, block, shared, schedule, truncating, guards,
# n_guards, culprit, stacks.
ARGUMENTS = [ctypes.c_void_p, Size, Size, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
ARGUMENTS += [ctypes.c_void_p, ctypes.c_longlong, ctypes.POINTER(ctypes.c_longlong)]
ARGUMENTS += [ctypes.c_void_p]
STACKS = (ctypes.c_longlong * 4097)()  # shim::Stacks
# Other threads neither allocate nor free memory while a kernel runs, because it checks the guards.
MEMORY = threading.RLock()


def locked(method):
    """Make a method hold MEMORY."""

    @functools.wraps(method)
    def run(*args):
        with MEMORY:
            return method(*args)

    return run


@functools.cache
def names_of_kernels(text):
    return list(kernels.signatures(text))


class Region:
    """Memory that all emulated devices of a process share, separate from its other memory.

    A kernel that writes far out of bounds writes to this memory. Free bytes are 0xFF.
    """

    FILL = 1 << 20  # bytes to fill at once

    def __init__(self, nbytes):
        no_reserve = 0x4000  # mmap.MAP_NORESERVE, which exists since Python 3.13
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        self._map = mmap.mmap(-1, nbytes, flags)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._base = self._bytes.ctypes.data
        self._used, self._filled = self.FILL, 0
        self._free = collections.defaultdict(list)  # {bytes: addresses}

    def take(self, nbytes):
        """Return the address of `nbytes` bytes, which is a multiple of 256."""
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        offset, self._used = self._used, self._used + nbytes
        if self._used + self.FILL > len(self._bytes):
            raise MemoryError(f"emulated GPU: {nbytes} bytes do not fit")
        if self._used + self.FILL > self._filled:
            stop = self._used + 2 * self.FILL
            self._bytes[self._filled : stop] = 0xFF
            self._filled = stop
        return self._base + offset

    def give_back(self, address, nbytes):
        ctypes.memset(address, 0xFF, nbytes)
        self._free[nbytes].append(address)


@functools.cache
def region():
    return Region(EmulatedDevice.memory)


class Memory:
    """An allocation on the device, freed when this object is garbage-collected.

    `nbytes` is rounded up as on a GPU. The guard starts after the requested bytes.
    """

    def __init__(self, device, address, nbytes):
        self.address, self.nbytes = address, -(-nbytes // ALIGNED) * ALIGNED
        weakref.finalize(self, device._forget, address).atexit = False


class Kernel:
    """A compiled kernel with the C function `run`."""

    def __init__(self, name, library):
        self.name = name
        self.run = getattr(library, f"run_{name}")
        self.run.argtypes, self.run.restype = ARGUMENTS, ctypes.c_char_p
        self.threads = getattr(library, f"threads_{name}")()  # from its __launch_bounds__


class Token:
    """A point on a stream. Waiting for it calls `land`, which completes the earlier copies."""

    def __init__(self, moment=None, land=None):
        self.moment, self.land, self.queries = moment, land, 0


class EmulatedDevice:
    """The Device protocol on the CPU. Operations of the stream for computing run immediately.

    Operations of the stream for sums run as late as possible, when the other stream waits for them.

    `order` is the schedule of threads: 0 forward, 1 reverse, 2 random. With `truncate`, tensor
    cores round towards zero. `architecture`, `processors` and `shared` are properties of the
    device.
    """

    name = "emulated GPU"
    memory = 1 << 33
    sharers = 1
    synchronous = False

    def __init__(
        self, order=0, truncate=False, architecture="sm_90", processors=132, shared=232448
    ):
        self.order, self.truncate = order, truncate
        self.architecture, self.processors, self.shared = architecture, processors, shared
        self.launched = []  # the names of the kernels, in order
        self._regions = {}  # {address: bytes} of all memory that a kernel may access
        self._guards = {}  # {address: two guards, each (address, bytes, pattern)}
        self._starts = None  # (sorted addresses, guards as an array), None after a change
        self._pinned = {}  # {address: bytes}
        self._patterns = itertools.count(1)  # numbers for the patterns of guards
        self._arriving = []  # downloads to pinned memory that have not been waited for
        self._downloads = 0  # number of downloads since the start
        self._recorded = None  # the nodes of the graph that is being captured
        self.is_aside = False  # whether operations go to the stream for sums
        self._late = collections.deque()  # operations of that stream, and tokens of `back`

    # Memory

    def allocate(self, nbytes):
        self._not_captured("allocates memory")
        return Memory(self, self._take(nbytes), nbytes)

    def free_memory(self):
        return self.memory

    @locked
    def _take(self, nbytes):
        address = region().take(_with_guards(nbytes)) + GUARD
        pattern = _pattern(next(self._patterns))
        self._regions[address] = nbytes
        self._guards[address] = tuple(
            (place, GUARD, pattern) for place in (address - GUARD, address + nbytes)
        )
        for place, size, _ in self._guards[address]:
            _fill(place, size, pattern)
        self._starts = None
        return address

    @locked
    def _forget(self, address):
        nbytes = self._regions.pop(address)
        for table in (self._guards, self._pinned):
            table.pop(address, None)
        self._starts = None
        region().give_back(address - GUARD, _with_guards(nbytes))

    def pinned(self, nbytes):
        self._not_captured("allocates pinned memory")
        address = self._take(nbytes)
        self._pinned[address] = nbytes
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(memory, self._forget, address).atexit = False
        return np.frombuffer(memory, np.uint8)

    def _is_pinned(self, array):
        address = array.ctypes.data
        return any(a <= address < a + n for a, n in self._pinned.items())

    def _tables(self):
        if self._starts is None:
            guards = [pair for both in self._guards.values() for pair in both]
            self._starts = sorted(self._regions), np.array(guards, np.int64).reshape(-1, 3)
        return self._starts

    @locked
    def _check(self, address, operation, nbytes=0):
        """Raise RuntimeError unless the address lies in an allocation."""
        starts, _ = self._tables()
        index = bisect.bisect_right(starts, address) - 1
        start = starts[index] if index >= 0 else 0
        if index < 0 or address + nbytes > start + self._regions[start]:
            raise RuntimeError(f"{operation}: address {address:#x} is not in memory of the device")

    # Kernels

    def load(self, unit):
        self._not_captured("loads kernels")
        library = compiler.loaded(unit.text, unit.family, unit.defines)
        return {name: Kernel(name, library) for name in names_of_kernels(unit.text)}

    def launch(self, handle, launch):
        grid, block, shared = launch.grid, launch.block, launch.shared
        threads = int(np.prod(block))
        if threads % 32 or not 0 < threads <= handle.threads:
            raise RuntimeError(
                f"{handle.name}: a block of {threads} threads for a kernel with at most "
                f"{handle.threads}"
            )
        if min(grid) < 1 or max(grid[1:]) > 65535 or grid[0] >= 1 << 31:
            raise RuntimeError(f"{handle.name}: no device takes a grid of {grid}")
        if shared > self.shared:
            raise RuntimeError(f"{handle.name}: {shared} bytes of shared memory of {self.shared}")
        values = launch.values()
        for value, parameter in zip(values, launch.parameters, strict=True):
            if parameter.elements is not None and value.value:
                self._check(value.value, f"{handle.name}: {parameter.name}")
        self._do(self._run, handle, grid, block, shared, values)

    @locked
    def _run(self, handle, grid, block, shared, values):
        self.launched.append(handle.name)
        pointers = (ctypes.c_void_p * max(len(values), 1))(
            *[ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values]
        )
        _, guards = self._tables()
        culprit = ctypes.c_longlong()
        schedule, table = (self.order, self.truncate), (guards.ctypes.data, len(guards))
        sizes = Size(*grid), Size(*block), shared
        ends = ctypes.byref(culprit), ctypes.addressof(STACKS)
        error = handle.run(pointers, *sizes, *schedule, *table, *ends)
        if error is not None:
            text = error.decode()
            if culprit.value >= 0:
                text += self._place(*map(int, guards[culprit.value]))
            raise RuntimeError(f"kernel {handle.name}: {text}")

    def _place(self, guard, size, pattern):
        """Restore a guard that was overwritten, and describe the position of its allocation."""
        _fill(guard, size, pattern)
        if guard + GUARD in self._regions:
            return f", before an allocation of {self._regions[guard + GUARD]} bytes"
        (nbytes,) = [n for a, n in self._regions.items() if a + n == guard]
        return f", after an allocation of {nbytes} bytes"

    def _do(self, function, *arguments):
        """Call the function now, or record it if a graph is being captured.

        In the stream for sums, call it when the other stream waits for it.
        """
        if self.is_aside:
            function, arguments = self._late.append, ((function, arguments),)
        if self._recorded is None:
            function(*arguments)
        else:
            self._recorded.append((function, arguments))

    # Copies

    def upload(self, address, array):
        if not self._is_pinned(array):
            self._not_captured("uploads from memory that is not pinned")
        self._check(address, "upload", array.nbytes)
        self._do(_move, address, array.ctypes.data, array.nbytes, array)

    def download(self, array, address):
        self._check(address, "download", array.nbytes)
        if self._is_pinned(array):
            self._do(self._download_later, array, address)
        else:
            self._not_captured("downloads to memory that is not pinned")
            _move(array.ctypes.data, address, array.nbytes)

    def _download_later(self, array, address):
        value = np.empty(array.nbytes, np.uint8)
        _move(value.ctypes.data, address, array.nbytes)
        ctypes.memset(array.ctypes.data, 0xFF, array.nbytes)  # undefined until the copy arrives
        self._arriving.append((array, value))
        self._downloads += 1

    def copy(self, destination, source, nbytes):
        self._check(destination, "copy", nbytes)
        self._check(source, "copy", nbytes)
        self._do(_move, destination, source, nbytes)

    def stage(self, address, array):
        self._not_captured("stages an upload")
        if not self._is_pinned(array):
            raise RuntimeError("stage: the array's memory is not pinned")
        self._check(address, "stage", array.nbytes)
        ctypes.memset(address, 0xFF, array.nbytes)  # the data arrive when a stream waits
        return Token(land=lambda: _move(address, array.ctypes.data, array.nbytes))

    # Streams, events and graphs

    def synchronize(self):
        self._not_captured("synchronizes")
        if self.is_aside:
            self.join(self.back())
            self.is_aside = True
        self._arrive()

    @property
    def stream(self):
        """The stream of launches: a function that runs stream(function, *arguments) in it."""
        return self._do

    def aside(self):
        self.is_aside = True

    def back(self):
        self.is_aside, token = False, Token()
        self._do(self._late.append, token)
        return token

    def join(self, token):
        self._do(self._catch_up, token)

    def _catch_up(self, token):
        """Run the operations of the stream for sums up to the token, if they have not run yet."""
        while token in self._late:
            operation = self._late.popleft()
            if not isinstance(operation, Token):
                function, arguments = operation
                function(*arguments)

    def _arrive(self, keep=0):
        """Complete all downloads except the last `keep`."""
        while len(self._arriving) > keep:
            array, value = self._arriving.pop(0)
            _move(array.ctypes.data, value.ctypes.data, array.nbytes)

    def mark(self, timed=False):
        self._not_captured("records an event")
        before = self._downloads
        moment = time.perf_counter() if timed else None
        return Token(moment, lambda: self._arrive(keep=self._downloads - before))

    def wait(self, token):
        self._not_captured("waits for an event")
        self._land(token)

    def reached(self, token):
        """Return True from the second call on, so that a caller polls at least once."""
        self._not_captured("queries an event")
        token.queries += 1
        return token.queries > 1

    def after(self, token):
        self._not_captured("waits for the copy stream")
        self._land(token)

    def _land(self, token):
        land, token.land = token.land, None
        if land is not None:
            land()

    def elapsed(self, a, b):
        """Return the milliseconds between two tokens."""
        return 1e3 * (b.moment - a.moment)

    def capture(self, play):
        self._not_captured("captures another graph")
        self._recorded = nodes = []
        try:
            play()
        finally:
            self._recorded, self.is_aside = None, False
        ends = [arguments[0] for function, arguments in nodes if function == self._late.append]
        joined = [arguments[0] for function, arguments in nodes if function == self._catch_up]
        if any(isinstance(end, Token) and end not in joined for end in ends):
            raise RuntimeError("a captured graph does not wait for its stream for sums")
        return Graph(nodes)

    def _not_captured(self, action):
        if self._recorded is not None:
            raise RuntimeError(f"while a graph is being captured, something {action}")

    def close(self):
        """Do nothing, because garbage collection frees the device's memory."""


class Graph:
    """Captured calls. `launch` repeats these calls with the captured addresses."""

    def __init__(self, nodes):
        self.nodes = nodes

    def launch(self):
        for function, arguments in self.nodes:
            function(*arguments)


def _with_guards(nbytes):
    return -(-nbytes // ALIGNED) * ALIGNED + 2 * GUARD


def _pattern(n):
    """Return eight bytes that fill a guard and differ from allocation to allocation.

    Read as a float or double, the bytes are a signalling NaN, which no arithmetic returns.
    """
    return (0xFFF00000FFA00000 | n % 65536 << 32 | n % 65536) - (1 << 64)


def _fill(address, nbytes, pattern):
    value = np.full(nbytes // 8, pattern, np.int64)
    ctypes.memmove(address, value.ctypes.data, nbytes)


def _move(to, source, nbytes, keep=None):
    ctypes.memmove(to, source, nbytes)


@contextlib.contextmanager
def opened(order=0, **options):
    """Compute on an EmulatedDevice inside the `with` block.

    Each Array gets a separate allocation, so the guards detect writes outside an Array.
    """
    device = launching.open(EmulatedDevice(order, **options))
    launching.sink().empty = device.allocate
    try:
        yield device
    finally:
        launching.open(None)
        device.close()
