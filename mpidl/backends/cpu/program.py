"""Replay a training step that a `recorder.Recorder` recorded, without Python between kernels."""

import ctypes

import numpy as np

# NumPy types of C numbers that are stored in an int64 word by their bits.
WORDS = {ctypes.c_float: np.float32, ctypes.c_double: np.float64}


class Calls:
    """Consecutive calls of library functions, in the form that `mpidl_play` reads.

    `waits` is {address of a sum: function that waits for it}. A replay calls this function if a
    kernel call needs a sum that is not ready in time, and then repeats the kernel call.
    """

    def __init__(self, library, waits):
        self._library, self._waits, self._words, self._starts = library, waits, [], []
        self._types = {}  # {position: NumPy type of a number that is not an integer}

    def begin(self, name, arguments):
        """Begin a call of a function. `arguments` is the number of arguments to add next."""
        self._starts.append(len(self._words))
        self._words += [self._library.position(name), arguments]

    def add(self, word, kind=None):
        """Add an address or a number of a ctypes type, and return its position."""
        position = len(self._words)
        self._words.append(0)
        if kind in WORDS:
            self._types[position] = WORDS[kind]
        self[position] = word
        return position

    def __setitem__(self, position, value):
        """Set the number or address at a position."""
        dtype = self._types.get(position)
        if dtype is not None:
            number = np.zeros(2, dtype)
            number[0] = value
            value = int(number.view(np.int64)[0])
        self._words[position] = value

    def finish(self):
        """Convert the calls to an array for the library. No calls can be added afterwards."""
        self._words = np.array(self._words, np.int64)

    def __call__(self):
        """Run the calls. Return False if `need_finite` has ended them early."""
        count, complete = len(self._starts), self._library.play(self._words, len(self._starts))
        while complete < count:
            start = self._starts[complete]
            if self._words[start] == self._library.position("need_finite"):
                return False
            self._waits[int(self._words[start + 3])]()  # the second argument of `sums_wait`
            complete += self._library.play(self._words[start:], count - complete)
        return True


class Inputs:
    """The positions of the numbers and addresses in a program that change between replays."""

    def __init__(self):
        self._positions, self._current = {}, {}

    def add(self, name, words, index, offset=0):
        """Let `set(name, value)` set words[index] to the value, or to an address plus an offset."""
        self._positions.setdefault(name, []).append((words, index, offset))

    def set(self, name, value):
        """Set the number, or the address of the array, that was recorded under this name."""
        if self._current.get(name) != value:
            for words, index, offset in self._positions.get(name, ()):
                words[index] = value + offset if offset else value
            self._current[name] = value


class Program:
    """A recorded training step, divided into parts that the caller runs one after another.

    Each of the `parts` is a list of its `Calls` and of functions without arguments, in order.
    `inputs` are the numbers and addresses that change, and `outputs` functions that return the
    results after a replay. `places` has the size and the offset in bytes of each large array; see
    `PlannedArena.follow`. `owners` keep the memory of the program alive.
    """

    def __init__(self, parts, inputs, outputs, places, owners):
        self.inputs, self.places = inputs, places
        self.parts, self._outputs, self._owners = parts, outputs, owners

    def results(self):
        """Return the results of the last replay, as a list."""
        return [output() for output in self._outputs]

    def run(self, *parts):
        """Run the parts with these indices. Return False if `need_finite` has ended them early."""
        for part in parts:
            for step in self.parts[part]:
                if step() is False:
                    return False
        return True
