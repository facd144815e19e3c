"""Record the launches of a training step, and plan the memory of all its arrays in advance.

The Python code of the training step runs once while a `Recorder` is the launch sink (see
`launching.through`). The Recorder computes nothing: it records every launch with its arrays.
`finish` then does the following:

- It assigns an address in one slab of memory to each array that the training step created. Arrays
  that are needed at different times may share memory.
- It collects the scalars that change between training steps (number of images, indices of images,
  learning rate) in `controls`. The first kernel of a training step fills `controls` from a row of
  pinned memory, to which the host has written the scalars. The launches that `before_step`
  collected follow.
- The launches of `later` wait until something needs their results, and go out together.
- It splits the launches into segments at each operation of the host, such as the start of a sum in
  host memory, and captures each segment as one CUDA graph.

A replay allocates no device memory and needs one launch per segment. The host waits only for a sum,
or if too many training steps are in progress.
"""

import itertools
import math

import numpy as np

from mpidl.backends import memory_plan
from mpidl.backends.gpu import fold, kernels, launching, program
from mpidl.backends.gpu.launching import Array
from mpidl.backends.gpu.program import ROWS, Program
from mpidl.core.fold import add

WAITING = 1 << 28  # bytes: limit of the Arrays that launches may keep in memory by waiting


class Planned:
    """A buffer that a training step needs from operation `first` to operation `last`."""

    def __init__(self, nbytes):
        self.nbytes = -(-max(nbytes, 1) // launching.ALIGNED) * launching.ALIGNED
        self.address, self.first, self.last = None, None, None


class Recorder:
    """A launch sink that records the operations of one training step."""

    def __init__(self, device):
        self.device = device
        self.steps, self.planned, self.tables, self.stored, self.values = [], [], [], [], []
        self.controls = Planned(0)  # `finish` allocates `controls`, once the size is known
        self.slots, self.words = {}, 0  # {name: (Array, initial value)}
        self.touched = {}  # {id(buffer): last operation} of buffers outside the slab
        self.early = {}  # {key: Rows} of the launches before the first operation
        self.waiting = {}  # {key: Rows} of the launches that nothing needs yet

    # interface of a launch sink

    def empty(self, nbytes):
        buffer = Planned(nbytes)
        self.planned.append(buffer)
        return buffer

    def launch(self, launch):
        read, written = [], []
        for value, parameter in zip(launch.arguments, launch.parameters, strict=True):
            if isinstance(value, launching.Table):
                written += value.arrays
            elif isinstance(value, Array):
                (read if parameter.is_const else written).append(value)
        self._settle(read, written)
        self._step(program.kernel(launch), read + written)

    def before_step(self, rows):
        arrays = rows.arrays
        self._settle(arrays)
        if any(getattr(array.buffer, "first", None) is not None for array in arrays):
            rows.launch()  # the step has computed a source
            return
        self._touch(arrays, -1)
        _collect(self.early, rows)

    def later(self, rows):
        # A row may wait for a row of another kernel, but not for one that waits for others itself:
        # so no kernel waits for itself.
        for key, waiting in list(self.waiting.items()):
            if _feeds(waiting, rows) and (key == rows.key or self._is_fed(waiting)):
                self._launch(key)
        _collect(self.waiting, rows)
        sizes = {key: _bytes_held(waiting.arrays) for key, waiting in self.waiting.items()}
        if sum(sizes.values()) > WAITING:
            self._launch(max(sizes, key=lambda key: sizes[key]))

    def _is_fed(self, rows):
        return any(_feeds(waiting, rows) for waiting in self.waiting.values())

    def take(self, name, result):
        for key, rows in self.waiting.items():
            for i, results in enumerate(rows.results):
                if name == rows.name and [*map(_place, results)] == [_place(result)]:
                    row, _ = rows.rows.pop(i), rows.results.pop(i)
                    if not rows.rows:
                        del self.waiting[key]
                    return row
        return None

    def _settle(self, read, written=()):
        """Launch the waiting rows that compute an Array, or that read one that is `written`."""
        results = {id(array.buffer) for array in (*read, *written)}
        sources = {id(array.buffer) for array in written}
        for key, rows in list(self.waiting.items()):
            if rows.computed & results or rows.buffers & sources:
                self._launch(key)

    def _settle_all(self):
        for key in list(self.waiting):
            self._launch(key)

    def _launch(self, key):
        rows = self.waiting.pop(key, None)
        if rows is not None:
            self._settle([x for x in rows.arrays if id(x.buffer) not in rows.computed])
            with launching.through(self):
                launch = rows.as_launch()
            self._step(program.kernel(launch), rows.arrays)

    def scalar(self, name, value, dtype):
        value = np.atleast_1d(np.asarray(value, dtype))
        if name not in self.slots:
            word = -(-self.words // 2) * 2  # 8-byte scalars are aligned to 8 bytes
            self.words = word + -(-value.nbytes // 4)
            array = Array(self.controls, dtype, value.shape, offset=4 * word)
            self.slots[name] = (array, value)
        array, _ = self.slots[name]
        if array.dtype != dtype or array.shape != value.shape:
            raise ValueError(
                f"{name} already has shape {array.shape} and type {array.dtype} in this step"
            )
        return array

    def table(self, rows):
        table = launching.Table(rows, launching.persistent((len(rows), len(rows[0])), np.int64))
        self.tables.append(table)
        return table

    # operations other than kernels

    def operate(self, operation, arrays):
        """Record a `program.Operation` that reads or writes `arrays`."""
        self._settle((), arrays)
        self._step(operation, arrays)

    def host_array(self, shape, dtype):
        """Return an array of pinned memory for an operation that copies to or from the host."""
        nbytes = math.prod(shape) * dtype.itemsize
        return self.device.pinned(max(nbytes, 1))[:nbytes].view(dtype).reshape(shape)

    def store(self, new, old):
        """Let the next training step read the value of `new` where this step reads `old`."""
        self.stored.append((new, old))

    def output(self, value):
        """Add a result of the step to `values`."""
        self.values.append(value)

    def _step(self, step, arrays):
        self._touch(arrays, len(self.steps))
        self.steps.append(step)

    def _touch(self, arrays, index):
        for array in arrays:
            buffer = array.buffer
            if isinstance(buffer, Planned):
                buffer.first = index if buffer.first is None else buffer.first
                buffer.last = index
            else:
                self.touched[id(buffer)] = max(self.touched.get(id(buffer), index), index)

    # finishing

    def finish(self, outputs, graphs=True):
        """Plan the memory, capture the segments as CUDA graphs if `graphs`, return the Program.

        `outputs` are the scalars that the host receives after each step, {name: Array () float64}.
        """
        sums = {_place(array): array for array in outputs.values()}  # an output may occur twice
        with launching.through(self):  # program_end folds the sums that wait
            folds = {place: fold.leaves_of(array, add) for place, array in sums.items()}
        ends = [folds[_place(array)] for array in outputs.values()]
        self._settle_all()
        self._store()
        table = self.table(ends)
        counter = launching.persistent((2,), np.int32)
        words = max(self.words, 1)
        ring = self.device.pinned(4 * words * ROWS).view(np.int32).reshape(ROWS, words)
        numbers = self.device.pinned(8 * max(len(ends), 1) * ROWS).view(np.float64)
        numbers = numbers.reshape(ROWS, max(len(ends), 1))
        controls = launching.persistent((words,), np.int32)
        self.controls.address = controls.address
        arguments = table, counter, _as_device_array(numbers)
        self.launch(kernels.make("program_end", len(ends), 256, arguments))
        arguments = _as_device_array(ring), ROWS, words, counter, controls
        begin = kernels.make("program_begin", 1, 256, arguments)
        with launching.through(self):
            early = [rows.as_launch() for rows in self.early.values()]
        slab, nbytes = self._plan()
        self.steps[:0] = map(program.kernel, [begin, *early])
        for table in self.tables:
            self.device.upload(table.address, table.filled())
        self.device.synchronize()
        return Program(
            self.device,
            _segments(self.steps),
            ring=ring,
            numbers=numbers,
            slots=self.slots,
            names=list(outputs),
            owners=(slab, controls, counter, self.tables),
            nbytes=nbytes,
            graphs=graphs,
        )

    def _store(self):
        """Store each new array in the memory of its old array, or copy it there after the step.

        All new arrays in one buffer move together or not at all. Otherwise, an array that moves
        could overwrite a neighbour that stays, such as a frozen weight.
        """
        pieces = {}
        for new, old in self.stored:
            pieces.setdefault(id(new.buffer), []).append((new, old))
        for pairs in pieces.values():
            self._take_place(pairs)
        for new, old in self.stored:
            if _place(new) != _place(old):
                self._step(program.copy(new, old), [new, old])

    def _take_place(self, pairs):
        """Move the buffer of the new arrays to the address of the old arrays' buffer, if possible.

        `pairs` contains a pair (new, old) for each array. The move is possible if the new buffer
        holds no other arrays, and each new array has the offset and size of its old array. In
        addition, no operation may use the old buffer after the first use of the new buffer.
        """
        buffer, old_buffer = pairs[0][0].buffer, pairs[0][1].buffer
        if not isinstance(buffer, Planned) or buffer.address is not None:
            return
        last_read = self.touched.get(id(old_buffer), -1)
        nbytes = sum(-(-new.nbytes // launching.ALIGNED) * launching.ALIGNED for new, _ in pairs)
        if (
            nbytes == buffer.nbytes <= getattr(old_buffer, "nbytes", 0)
            and (buffer.first is None or last_read <= buffer.first)
            and all(old.buffer is old_buffer for _, old in pairs)
            and all((new.offset, new.nbytes) == (old.offset, old.nbytes) for new, old in pairs)
        ):
            buffer.address = old_buffer.address

    def _plan(self):
        """Assign every planned buffer an address in one slab; return the slab and its size."""
        todo = [b for b in self.planned if b.address is None and b.first is not None]
        offsets, total = memory_plan.place([(b.nbytes, b.first, b.last) for b in todo])
        slab = self.device.allocate(max(total, 1))
        for buffer, offset in zip(todo, offsets, strict=True):
            buffer.address = slab.address + offset
        return slab, total


def _collect(collected, rows):
    """Add Rows to the Rows of the same launch in {key: Rows}."""
    if rows.key in collected:
        collected[rows.key].add(rows.rows, rows.results, rows.blocks)
    else:
        collected[rows.key] = rows


def _bytes_held(arrays):
    """Return the bytes of the step's memory that launches which use the Arrays keep by waiting."""
    buffers = {id(array.buffer): array.buffer for array in arrays}.values()
    return sum(b.nbytes for b in buffers if getattr(b, "first", None) is not None)


def _feeds(waiting, rows):
    """Return whether waiting Rows compute a source of other Rows."""
    return bool(waiting.computed & (rows.buffers - rows.computed))


def _place(array):
    """Return the address of an array, or (buffer, offset) if the address is not known yet."""
    has_address = array.buffer.address is not None
    return array.address if has_address else (array.buffer, array.offset)


def _as_device_array(pinned):
    """Return pinned host memory as an Array. Kernels use the host's address."""
    holder = launching.Block(pinned.ctypes.data, pinned.nbytes)
    return Array(holder, pinned.dtype, pinned.shape)


def _segments(steps):
    """Split operations into runs that a CUDA graph can capture, and single other operations."""
    segments = []
    for captured, group in itertools.groupby(steps, key=lambda step: step.captured):
        run = list(group)
        segments += [run] if captured else [[step] for step in run]
    return segments
