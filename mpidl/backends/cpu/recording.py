"""Record the kernel calls of a training step on a CPU while the step runs.

The module `program` replays the calls. A Recorder stores each library call with the addresses and
numbers of its arguments. Kernels may read only memory that a replay fills too: arrays that earlier
recorded calls wrote, inputs, learnables, and constants. If a kernel reads an array that was
computed in another way, for example with NumPy, the step cannot be recorded. In this case
`Recorder.problem` says why, and the step itself continues normally.

Temporary arrays come from an arena of the recorder. A replay writes to the same addresses.
"""

import bisect
import contextlib
import ctypes
import threading

import numpy as np

from mpidl.backends.cpu import arenas, builds
from mpidl.backends.cpu.planned_arena import PlannedArena
from mpidl.backends.cpu.program import Calls, Inputs, Program

_recorder = None  # the current Recorder


class _NamedFloat(float):
    name: str


class _NamedInt(int):
    name: str


def scalar(name, value):
    """Return a number that each replay can set by this name, or `value` if no step is recorded."""
    if _recorder is None:
        return value
    result = (_NamedFloat if isinstance(value, float) else _NamedInt)(value)
    result.name = name
    return result


def numbers(values):
    """Return `values` as a float32 array for a kernel. Values may be results of `scalar`."""
    array = np.array(values, np.float32)
    if _recorder is not None:
        _recorder.constant(array)
        for i, value in enumerate(values):
            if isinstance(value, (_NamedFloat, _NamedInt)):
                _recorder.inputs.add_number(value.name, array, i)
    return array


def addresses(table, reads, writes):
    """Return `table`, an int64 array of addresses for a kernel.

    If a step is being recorded, record the table too. `reads` and `writes` are the arrays that the
    kernel reads and writes at these addresses.
    """
    if _recorder is not None:
        _recorder.table(table, reads, writes)
    return table


def owns(arrays):
    """Return whether a step is being recorded that may update all these arrays in place."""
    return _recorder is not None and all(map(_recorder.owns, arrays))


def address_of(array):
    """Return the address of an array's first element."""
    if array.size and array.flags.writeable and array.flags.c_contiguous:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # four times as fast
    return array.ctypes.data


class _Place:
    """A description of memory that NumPy can view, without keeping the memory allocated."""

    __slots__ = ("__array_interface__",)

    def __init__(self, interface):
        self.__array_interface__ = interface


def fixed(array):
    """Return an array at the same address that does not keep the memory allocated."""
    if not array.size:
        return np.empty(array.shape, array.dtype)
    return np.asarray(_Place({**array.__array_interface__, "strides": None}))


class _Range:
    """A range of memory that the recorder knows.

    `name` is the name of the input that the range contains, or None. `is_written` tells whether the
    contents are valid, and `is_owned` whether the step may update the contents in place.
    """

    def __init__(self, start, nbytes, is_written=True, name=None, is_owned=False):
        self.start, self.stop = start, start + nbytes
        self.is_written, self.name, self.is_owned = is_written, name, is_owned


class _Arena(PlannedArena):
    """The arena of a recorder, which reports each allocation to the recorder."""

    def __init__(self):
        super().__init__()
        self.on_take = lambda address, size: None

    def take(self, size):
        address = super().take(size)
        self.on_take(address, size)
        return address


class Recorder:
    """Records a training step that runs on the host.

    Parameters
    ----------
    owned : list of ndarray
        Learnables, state and optimizer arrays. The step may update these arrays in place, and
        their addresses must not change.
    arena : PlannedArena, optional
        The arena of another recorder's step, which runs at other times. By default, a new arena.

    Attributes
    ----------
    problem : str or None
        Reason why the step cannot be recorded, or None if it can be recorded.
    arena : PlannedArena
        The arena of the step's arrays. The Program keeps this arena.
    wait : callable or None
        Function that waits for a sum over the ranks, given its address; see `program.Calls`.
    """

    def __init__(self, owned, arena=None):
        self.problem, self.arena, self.inputs = None, arena or _Arena(), Inputs()
        self.wait = None
        self.arena.on_take, self._thread = self._allocated, threading.get_ident()
        self._starts, self._ranges = [], {}
        self._alive, self._parts = [owned], [[]]
        for array in owned:
            if not array.flags.c_contiguous or not array.flags.writeable:
                self.refuse("an array of the network or the optimizer is not contiguous")
            self._add(_Range(address_of(array), array.nbytes, is_owned=True))

    @contextlib.contextmanager
    def recording(self):
        """Record the library calls within the `with` block."""
        global _recorder
        _recorder, builds.on_call = self, self._called
        try:
            with arenas.through(self.arena):
                yield
        finally:
            _recorder = builds.on_call = None

    def refuse(self, problem):
        """Store the reason why the step cannot be recorded. The first reason is kept."""
        self.problem = self.problem or problem

    def input(self, name, array):
        """Declare an array that each replay may replace by another array of the same shape.

        The caller must keep the array alive until the end of the recording.
        """
        if not array.flags.c_contiguous:
            self.refuse(f"the input {name} is not contiguous")
        self._add(_Range(address_of(array), array.nbytes, name=name))

    def constant(self, array):
        """Declare an array whose contents are the same in all replays, and return the array.

        Numbers in the array may still be set by name (see `program.Inputs`).
        """
        self._alive.append(array)
        self._add(_Range(address_of(array), array.nbytes))
        return array

    def call_python(self, function, writes=()):
        """Let replays call function() at this point. The function writes the arrays `writes`."""
        self._parts[-1].append(function)
        for array in writes:
            self._write(array)

    def call_sum(self, name, queue, host_sum, writes=()):
        """Let replays call a function of sums.c at this point of the step.

        Parameters
        ----------
        name : {"sums_start", "sums_wait"}
            Name of the function.
        queue : SumQueue
            First argument of the function.
        host_sum : HostSum
            Second argument of the function.
        writes : sequence of ndarray
            The arrays that are complete after the call.
        """
        self._alive.append((queue, host_sum))
        calls = self._calls()
        calls.begin(name, 2)
        for words in queue.words, host_sum.words:
            calls.add(address_of(words))
        for array in writes:
            self._write(array)

    def need_finite(self, number):
        """Let replays end early at this point if a float64 array of one number is not finite."""
        self._alive.append(number)
        calls = self._calls()
        calls.begin("need_finite", 1)
        calls.add(address_of(number))

    def next_part(self):
        """End the current part of the step. The user of the Program runs the parts one by one."""
        self._parts.append([])

    def fix(self, array):
        """Return `fixed(array)` for an array that the step has computed."""
        self._read(array, "an exchange")
        return fixed(array)

    def finish(self):
        """End the recording, and return the Program."""
        self.arena.on_take = lambda address, size: None
        for part in self._parts:
            for step in part:
                if isinstance(step, Calls):
                    step.finish()
        return Program(self._parts, self.inputs, (self._alive, self.arena))

    def owns(self, array):
        """Return whether the array is one of the arrays that the step may update in place."""
        memory = self._range(array)
        return memory is not None and memory.is_owned

    # ---- memory ----

    def _allocated(self, address, size):
        self._add(_Range(address, size, is_written=False))

    def _add(self, memory):
        """Add a range. Remove overlapping ranges, because their memory has been freed."""
        i = bisect.bisect_left(self._starts, memory.start)
        if i and self._ranges[self._starts[i - 1]].stop > memory.start:
            i -= 1
        while i < len(self._starts) and self._starts[i] < memory.stop:
            del self._ranges[self._starts.pop(i)]
        if memory.stop > memory.start:
            self._starts.insert(i, memory.start)
            self._ranges[memory.start] = memory

    def _range(self, array):
        """Return the known range that contains an array, or None."""
        start = address_of(array)
        i = bisect.bisect_right(self._starts, start) - 1
        memory = self._ranges[self._starts[i]] if i >= 0 else None
        return memory if memory is not None and start + array.nbytes <= memory.stop else None

    def _read(self, array, reader):
        memory = self._range(array)
        if array.size and (memory is None or not memory.is_written):
            self.refuse(f"{reader} reads an array that no kernel computed")
        return memory

    def _write(self, array):
        memory = self._range(array)
        if memory is not None and memory.name is None:
            memory.is_written = True
        elif array.size:
            self.refuse("a kernel writes to an array of unknown origin")

    # ---- calls ----

    def table(self, table, reads, writes):
        """Record a table of addresses, and the arrays that a kernel reads and writes through it."""
        self.constant(table)
        flat = table.reshape(-1)
        for array in reads:
            memory = self._read(array, "the update")
            if memory is not None and memory.name is not None:
                address = address_of(array)
                for i in np.flatnonzero(flat == address):
                    self.inputs.add_address(memory.name, flat, i, address - memory.start)
        for array in writes:
            self._write(array)

    def _calls(self):
        """Return the last Calls of the current part."""
        steps = self._parts[-1]
        if not (steps and isinstance(steps[-1], Calls)):
            steps.append(Calls(builds.kernels(), self.wait))
        return steps[-1]

    def _called(self, name, arguments):
        """Record a library call that has just returned."""
        if threading.get_ident() != self._thread:
            return
        calls, written = self._calls(), []
        types = builds.kernels().argument_types(name)
        calls.begin(name, len(arguments))
        for kind, argument in zip(types, arguments, strict=True):
            if isinstance(argument, np.ndarray):
                self._array(calls, name, argument, kind.const)
                written += [] if kind.const else [argument]
            elif isinstance(argument, bytes):
                self._alive.append(text := np.frombuffer(argument + b"\0", np.uint8))
                calls.add(address_of(text))
            elif isinstance(argument, (_NamedFloat, _NamedInt)):
                self.inputs.add_number(argument.name, *calls.add_number(argument, kind))
            else:
                calls.add_number(0 if argument is None else argument, kind)
        for array in written:
            self._write(array)

    def _array(self, calls, name, array, is_read):
        memory = self._range(array)
        if is_read and memory is None and array.dtype == np.int64:
            array = self.constant(array.copy())  # for example, the sizes and strides of a layer
        elif is_read:
            memory = self._read(array, name)
        position = calls.add(address_of(array))
        if memory is not None and memory.name is not None:
            offset = address_of(array) - memory.start
            self.inputs.add_address(memory.name, calls, position, offset)
