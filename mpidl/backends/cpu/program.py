"""Replay a training step that a `recorder.Recorder` recorded, without Python between kernels."""

import ctypes
import itertools

import numpy as np

# NumPy types of C numbers that are stored in an int64 word by their bits.
WORDS = {ctypes.c_float: np.float32, ctypes.c_double: np.float64}


class Calls:
    """Consecutive calls of library functions, in the form that `mpidl_play` reads.

    Parameters
    ----------
    library : Library
        The library.
    waits : dict
        {address of a sum: function that waits for it}. A replay calls this function if a kernel
        call needs a sum that is not ready in time, and then repeats the kernel call.
    """

    def __init__(self, library, waits):
        self._library, self._waits, self._words, self._starts = library, waits, [], []
        self.types = {}  # {position: NumPy type of a number that is not an integer}
        self._check = library.position("need_finite")

    def begin(self, name, arguments):
        """Begin a call of a function. `arguments` is the number of arguments to add next."""
        self._starts.append(len(self._words))
        self._words += [self._library.position(name), arguments]

    def add(self, word):
        """Add an integer or an address, and return its position."""
        self._words.append(word)
        return len(self._words) - 1

    def add_number(self, value, kind):
        """Add a number of a ctypes type, and return (self, position) for `Inputs.add_number`."""
        position = self.add(0)
        if kind in WORDS:
            self.types[position] = WORDS[kind]
        self.set(position, value)
        return self, position

    def set(self, position, value):
        """Set the number or address at a position."""
        dtype = self.types.get(position)
        if dtype is not None:
            number = np.zeros(2, dtype)
            number[0] = value
            value = int(number.view(np.int64)[0])
        self._words[position] = value

    __setitem__ = set

    def finish(self):
        """Convert the calls to an array for the library. No calls can be added afterwards."""
        self._words = np.array(self._words, np.int64)

    @classmethod
    def joined(cls, parts):
        """Return the calls of several finished objects as one object, which shares its memory."""
        joined = cls(parts[0]._library, parts[0]._waits)
        joined._words = np.concatenate([part._words for part in parts])
        first = 0
        for part in parts:
            stop = first + len(part._words)
            part._words = joined._words[first:stop]
            joined._starts += [first + start for start in part._starts]
            first = stop
        return joined

    def __call__(self):
        """Run the calls. Return False if `need_finite` has ended them early."""
        count = len(self._starts)
        complete = self._library.play(self._words, count)
        while complete < count:
            start = self._starts[complete]
            if self._words[start] == self._check:
                return False
            self._waits[int(self._words[start + 3])]()  # the second argument of `sums_wait`
            complete += self._library.play(self._words[start:], count - complete)
        return True


class Inputs:
    """The positions of the numbers and addresses in a program that change between replays."""

    def __init__(self):
        self._numbers, self._addresses, self._current = {}, {}, {}

    def add_number(self, name, words, index):
        """Let `set_number(name, value)` set words[index]. `words` is an array or a Calls."""
        self._numbers.setdefault(name, []).append((words, index))

    def add_address(self, name, words, index, offset):
        """Let `set_address(name, address)` set words[index] to address + offset (in bytes)."""
        self._addresses.setdefault(name, []).append((words, index, offset))

    def set_number(self, name, value):
        """Set the number that was recorded under this name."""
        if self._current.get(name) != value:
            for words, index in self._numbers.get(name, ()):
                words[index] = value
            self._current[name] = value

    def set_address(self, name, address):
        """Set the address of the input array that was recorded under this name."""
        if self._current.get(name) != address:
            for words, index, offset in self._addresses.get(name, ()):
                words[index] = address + offset
            self._current[name] = address


class Program:
    """A recorded training step, divided into parts that the caller runs one after another.

    Parameters
    ----------
    parts : list of list
        For each part, its `Calls` and functions without arguments, in order.
    inputs : Inputs
        The numbers and addresses that change between replays.
    outputs : list of callable
        Functions that return the results of the step after a replay.
    places : list of (int, int)
        Size and offset in bytes of each large array, in the order of their allocation; see
        `PlannedArena.follow`.
    owners : object
        Object that keeps the memory of the program alive.
    """

    def __init__(self, parts, inputs, outputs, places, owners):
        self.parts, self.inputs, self.places = parts, inputs, places
        self._outputs, self._owners = outputs, owners
        self._steps = []  # the steps of all parts, with consecutive calls as one step
        for kind, group in itertools.groupby(itertools.chain(*parts), type):
            steps = list(group)
            self._steps += [Calls.joined(steps)] if kind is Calls else steps

    def results(self):
        """Return the results of the last replay, as a list."""
        return [output() for output in self._outputs]

    def run(self, part):
        """Run the part with this index, from 0."""
        for step in self.parts[part]:
            step()

    def run_all(self):
        """Run all parts. Return False if `need_finite` has ended the program early."""
        for step in self._steps:
            if step() is False:
                return False
        return True
