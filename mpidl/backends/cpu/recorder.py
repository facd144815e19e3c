"""Record the kernel calls of a training step on a CPU: the Recorder, and the plan of its memory.

The Python code of the step runs once while a `Recorder` takes the kernel calls (`builds.through`)
and provides the arrays. Nothing is computed. The Recorder stores each call with the addresses and
numbers of its arguments, and notes when each large array is allocated and freed. `finish` then
places the large arrays in one slab (`memory_plan`) and returns a `program.Program`, which replays
the calls.

Kernels may read only memory that a replay fills, too: arrays that earlier operations wrote, inputs,
learnables, and constants. If a kernel reads an array that was computed in another way, for example
with NumPy, the step cannot be replayed, and `Recorder.problem` says why.
"""

import bisect
import contextlib
import ctypes
import functools
import math
import mmap
from dataclasses import replace

import numpy as np

from mpidl.backends import memory_plan
from mpidl.backends.cpu import arenas, builds
from mpidl.backends.cpu.arenas import address_of
from mpidl.backends.cpu.planned_arena import PLANNED, PlannedArena
from mpidl.backends.cpu.program import Calls, Inputs, Program
from mpidl.core.fold import Partial


class _NamedFloat(float):
    name: str


class _NamedInt(int):
    name: str


class _Buffer:
    """Memory that operations use, from its first to its last time if its place is planned.

    `name` is the name of the input that the buffer contains, or None. `is_written` tells whether
    the contents are valid, and `total` is a `_Total` if the contents are still to be computed.
    """

    def __init__(self, start, nbytes, is_written=True, name=None, first=None):
        self.start, self.stop, self.address = start, start + nbytes, start
        self.is_written, self.name, self.total = is_written, name, None
        self.first, self.last = first, None


class Place:
    """The place of an array in a buffer, whose address may not be known before `finish`."""

    def __init__(self, array, buffer):
        self.shape, self.dtype, self._buffer = array.shape, array.dtype, buffer
        self._offset = 0 if buffer is None else address_of(array) - buffer.start

    @property
    def address(self):
        return self._buffer.address + self._offset

    def view(self):
        """Return the array at its final address, without owning the memory."""
        if self._buffer is None:
            return np.empty(self.shape, self.dtype)
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        memory = (ctypes.c_char * nbytes).from_address(self.address)
        return np.ndarray(self.shape, self.dtype, memory)


class _Total:
    """The total of a Partial, which replays compute from the roots of its terms."""

    def __init__(self, recorder, partial, roots, total):
        terms = [replace(term, nodes=[]) for term in partial.terms]
        self.partial = Partial(terms, None, partial.shape, partial.dtype)
        self.arrays = [*roots] if partial.addend is None else [*roots, partial.addend]  # keep them
        self._places = [recorder.place(array) for array in self.arrays]
        self.target = recorder.target(total)

    @functools.cached_property
    def compute(self):
        """The function that returns the total. The addresses must be known."""
        partial, arrays = self.partial, [place.view() for place in self._places]
        roots, addend = arrays[: len(partial.terms)], arrays[len(partial.terms) :]
        partial.addend = addend[0] if addend else None
        if partial.shape == () and len(arrays) == 1 and roots[0].dtype == partial.dtype == "f8":
            item, scale = roots[0].item, float(partial.terms[0].scale)
            return lambda: item() * scale  # Python's floats are faster
        return functools.partial(partial.finish, roots)

    def store(self, target):
        """Compute the total in a replay."""
        target[...] = self.compute()


class _Arena(arenas.Arena):
    """The arena of a step that is recorded.

    Large arrays get addresses of which nothing is written, except by Python code; their final
    addresses are planned later. Small arrays get their final addresses at once.
    """

    def __init__(self, memory, on_allocate):
        super().__init__(_small_pages, smallest=0)
        self.owned, self._small, self._on_allocate = memory.owned, memory.small, on_allocate
        self.time, self.planned, self._alive = 0, [], {}

    def _allocate(self, size):
        self.time += 1
        if size < PLANNED:
            buffer = _Buffer(self._small._allocate(size), size, is_written=False)
        else:
            buffer = _Buffer(super()._allocate(size), size, is_written=False, first=self.time)
            self._alive[buffer.start] = buffer
            self.planned.append(buffer)
        self._on_allocate(buffer)
        return buffer.start

    def _give_back(self, address, size):
        if size < PLANNED:
            self._small._give_back(address, size)
        else:
            super()._give_back(address, size)
            self._alive.pop(address).last = self.time

    def end(self):
        """Take back the memory of all deleted arrays. Arrays that are not deleted remain in use."""
        while self.returned:
            self._give_back(*self.returned.popleft())
        for buffer in self._alive.values():
            buffer.last = self.time + 1

    def forget(self):
        """Drop all references to the recorder; arrays may keep this arena, and form a cycle."""
        self._on_allocate, self.planned, self._alive = None, [], {}


def _small_pages(size):
    """Allocate a region from the system that uses memory only for the pages that are written."""
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return region, np.frombuffer(region, np.uint8).ctypes.data, size


class Recorder:
    """Records the operations of a training step on the host; see the text at the top of the file.

    `owned` are the learnables, state and optimizer arrays, which the step may update in place.
    Their addresses must not change. `memory` is the memory of another recorder's step, which runs
    at other times. `problem` is the first reason why the step cannot be replayed, or None. `waits`
    and `owners` are for the program: functions that wait for sums, see `program.Calls`, and objects
    that it keeps alive.
    """

    def __init__(self, owned, memory=None):
        self.problem, self.inputs, self.waits = None, Inputs(), {}
        self.memory = memory or PlannedArena(map(address_of, owned))
        self._arena = _Arena(self.memory, self._add)
        self._starts, self._buffers = [], {}
        self._parts, self._at_end, self._outputs = [[]], [], []
        self.owners = [owned, self.memory]
        for array in owned:
            if not array.flags.c_contiguous or not array.flags.writeable:
                self.refuse("an array of the network or the optimizer is not contiguous")
            self._add(_Buffer(address_of(array), array.nbytes))

    @contextlib.contextmanager
    def recording(self):
        """Record the kernel calls of the `with` block, and allocate its arrays."""
        with builds.through(self), arenas.through(self._arena), np.errstate(all="ignore"):
            try:
                yield
            except BaseException:
                self._arena.forget()
                raise

    def refuse(self, problem):
        """Store the reason why the step cannot be replayed. The first reason is kept."""
        self.problem = self.problem or problem

    # ---- values that differ between replays ----

    def input(self, name, array):
        """Declare an array that each replay may replace by another array of the same shape."""
        if not array.flags.c_contiguous:
            self.refuse(f"the input {name} is not contiguous")
        self._add(_Buffer(address_of(array), array.nbytes, name=name))

    def scalar(self, name, value):
        """Return a number that each replay can set by this name."""
        result = (_NamedFloat if isinstance(value, float) else _NamedInt)(value)
        result.name = name
        return result

    def numbers(self, array, values):
        """Declare a constant array of `values`, which may be results of `scalar`."""
        self.constant(array)
        for i, value in enumerate(values):
            if isinstance(value, (_NamedFloat, _NamedInt)):
                self.inputs.add(value.name, array, i)

    def constant(self, array):
        """Declare an array whose contents are the same in all replays, and return the array."""
        self.owners.append(array)
        self._add(_Buffer(address_of(array), array.nbytes))
        return array

    # ---- operations ----

    def launch(self, name, arguments):
        """Record a call of a kernel. Return 1, the result of kernels that report success."""
        types, values, written = builds.kernels().argument_types(name), [], []
        for kind, argument in zip(types, arguments, strict=True):
            if isinstance(argument, np.ndarray):
                kind.from_param(argument)  # raise an error for an array that the kernel cannot use
                if not kind.const:
                    written.append(argument)
                elif argument.dtype == np.int64 and self._buffer_of(argument) is None:
                    argument = self.constant(argument.copy())  # for example, a layer's sizes
                else:
                    self._read(argument, name)  # which may record a call before this one
            values.append(argument)
        calls = self._calls()
        calls.begin(name, len(values))
        for kind, argument in zip(types, values, strict=True):
            if isinstance(argument, np.ndarray):
                self._point(calls, calls.add(0), argument)
            elif isinstance(argument, bytes):
                self.owners.append(text := np.frombuffer(argument + b"\0", np.uint8))
                calls.add(address_of(text))
            else:
                position = calls.add(0 if argument is None else argument, kind)
                if isinstance(argument, (_NamedFloat, _NamedInt)):
                    self.inputs.add(argument.name, calls, position)
        self.written(*written)
        return 1

    def table(self, table, reads, writes):
        """Declare an int64 array with the addresses of arrays that a kernel reads and writes."""
        self.constant(table)
        flat = table.reshape(-1)
        for array in reads:
            self._read(array, "the update")
        for array in [*reads, *writes]:
            for i in np.flatnonzero(flat == address_of(array)) if array.size else ():
                self._point(flat, i, array)
        self.written(*writes)

    def call(self, name, *words):
        """Record a call of a kernel whose arguments are addresses, or functions that return them.

        `finish` calls the functions, when the addresses of all arrays are known.
        """
        calls = self._calls()
        calls.begin(name, len(words))
        for word in words:
            position = calls.add(0 if callable(word) else word)
            if callable(word):
                self._set_at_end(calls, position, word)

    def call_python(self, function, *arrays):
        """Record a call function(*arrays) of a Python function."""
        self._parts[-1].append((function, [self.place(array) for array in arrays]))

    def written(self, *arrays):
        """Declare that the operations so far write these arrays."""
        for array in arrays:
            buffer = self._buffer_of(array)
            if buffer is not None and buffer.name is None:
                buffer.is_written = True
            elif array.size:
                self.refuse("a kernel writes to an array of unknown origin")

    def need_finite(self, loss):
        """Let replays end at this point if the loss is not finite. Return False if none can tell.

        The kernel reads a float64 number: the loss, or the sum of which the loss is a multiple.
        """
        total = self._total_of(loss)
        if total is not None:
            terms, arrays = total.partial.terms, total.arrays
            if len(terms) != 1 or len(arrays) != 1 or abs(float(terms[0].scale)) > 1:
                return False
            if total.partial.dtype == np.float64:
                loss = arrays[0]
        if loss.shape or loss.dtype != np.float64:
            return False
        place = self.place(loss, "the check of the loss")
        self.call("need_finite", lambda: place.address)
        return True

    def next_part(self):
        """End the current part of the step. The user of the Program runs the parts one by one."""
        self._parts.append([])

    # ---- sums ----

    def total(self, partial, roots):
        """Return an array for the total of a Partial, given the roots of its terms.

        Replays compute the total when an operation first reads it. If none does, the total can only
        be an `output`.
        """
        array = arenas.empty(partial.shape, partial.dtype)
        self._buffer_of(array).total = _Total(self, partial, roots, array)
        return array

    def output(self, array):
        """Let `Program.results` return the contents of an array."""
        total = self._total_of(array)
        place = self.place(array, "a result") if total is None else None
        self._outputs.append((total, place))

    def store(self, new, old):
        """Record a copy of `new` to `old`."""
        builds.kernels().copy(new, old, old.size)

    # ---- the end ----

    def at_end(self, function):
        """Let `finish` call function() once the addresses of all arrays are known."""
        self._at_end.append(function)

    def plan(self):
        """Plan the memory of the step. Return the places of its large arrays, for `follow`."""
        self._arena.end()
        planned = self._arena.planned
        lives = [(buffer.stop - buffer.start, buffer.first, buffer.last) for buffer in planned]
        offsets, nbytes = memory_plan.place(lives)
        slab = self.memory.reserve(nbytes)
        for buffer, offset in zip(planned, offsets, strict=True):
            buffer.address = slab + offset
        self._arena.forget()
        return [(size, offset) for (size, *_), offset in zip(lives, offsets, strict=True)]

    def finish(self):
        """Plan the memory of the step, and return the Program."""
        places = self.plan()
        for function in self._at_end:
            function()
        outputs = [
            total.compute if total is not None else functools.partial(np.asarray, place.view())
            for total, place in self._outputs
        ]
        parts = [[_finished(step) for step in part] for part in self._parts]
        self._at_end.clear()  # which may hold this object
        return Program(parts, self.inputs, outputs, places, self.owners)

    # ---- memory ----

    def place(self, array, reader="a sum"):
        """Return the Place of an array that the step has computed, for the named reader."""
        if not array.flags.c_contiguous:
            self.refuse(f"{reader} reads an array that is not contiguous")
        return Place(array, self._read(array, reader) if array.size else None)

    def target(self, array):
        """Return the Place of an array that an operation is going to write."""
        return Place(array, self._buffer_of(array) if array.size else None)

    def _add(self, buffer):
        """Add a buffer. Remove overlapping buffers, because their memory has been freed."""
        i = bisect.bisect_left(self._starts, buffer.start)
        if i and self._buffers[self._starts[i - 1]].stop > buffer.start:
            i -= 1
        while i < len(self._starts) and self._starts[i] < buffer.stop:
            del self._buffers[self._starts.pop(i)]
        if buffer.stop > buffer.start:
            self._starts.insert(i, buffer.start)
            self._buffers[buffer.start] = buffer

    def _buffer_of(self, array):
        """Return the known buffer that contains an array, or None."""
        start = address_of(array)
        i = bisect.bisect_right(self._starts, start) - 1
        buffer = self._buffers[self._starts[i]] if i >= 0 else None
        return buffer if buffer is not None and start + array.nbytes <= buffer.stop else None

    def _total_of(self, array):
        """Return the _Total of an array that is still to be computed, or None."""
        buffer = self._buffer_of(array)
        return None if buffer is None else buffer.total

    def _read(self, array, reader):
        buffer = self._buffer_of(array)
        if buffer is not None and buffer.total is not None:  # compute the total now
            total, buffer.total, buffer.is_written = buffer.total, None, True
            self._parts[-1].append((total.store, [total.target]))
            total.arrays = []
        if array.size and (buffer is None or not buffer.is_written):
            self.refuse(f"{reader} reads an array that no kernel computed")
        return buffer

    def _calls(self):
        """Return the last Calls of the current part."""
        steps = self._parts[-1]
        if not (steps and isinstance(steps[-1], Calls)):
            steps.append(Calls(builds.kernels(), self.waits))
        return steps[-1]

    def _point(self, words, index, array):
        """Store the address of an array in words[index], once it is known."""
        words[index] = address = address_of(array)
        buffer = self._buffer_of(array)
        if buffer is not None and buffer.name is not None:
            self.inputs.add(buffer.name, words, index, address - buffer.start)
        elif buffer is not None and buffer.first is not None:
            place = Place(array, buffer)
            self._set_at_end(words, index, lambda: place.address)

    def _set_at_end(self, words, index, function):
        self.at_end(lambda: words.__setitem__(index, function()))


def _finished(step):
    """Return a step of a Program. The addresses of all arrays are known."""
    if isinstance(step, Calls):
        step.finish()
        return step
    function, places = step
    return functools.partial(function, *(place.view() for place in places))
