"""Replay the kernel calls that a `recording.Recorder` noted, without Python between the calls."""

import ctypes

import numpy as np

WORDS = {ctypes.c_float: np.float32, ctypes.c_double: np.float64}  # numbers stored as bits


class Calls:
    """Consecutive calls of the library's functions, as `mpidl_play` reads them.

    Parameters
    ----------
    library : Library
        The library.
    wait : callable
        Function to call with the address of a sum for which a call has waited in vain. The call is
        then made again.
    """

    def __init__(self, library, wait):
        self._library, self._wait, self._words, self._starts = library, wait, [], []
        self.types = {}  # {position: NumPy type of a number that is not an integer}

    def begin(self, name, arguments):
        """Add a call of a function, whose arguments follow."""
        self._starts.append(len(self._words))
        self._words += [self._library.position(name), arguments]

    def add(self, word):
        """Add an integer or an address, and return its position."""
        self._words.append(word)
        return len(self._words) - 1

    def add_number(self, value, kind):
        """Add a number of a C type; return the arguments of `Inputs.add_number` for it."""
        position = self.add(0)
        if kind in WORDS:
            self.types[position] = WORDS[kind]
        self.set(position, value)
        return self, position

    def set(self, position, value):
        """Set the number or address at a position."""
        number = np.zeros(2, self.types.get(position, np.int64))
        number[0] = value
        self._words[position] = int(number.view(np.int64)[0])

    __setitem__ = set

    def finish(self):
        """Convert the calls to the form that the library reads; no calls can be added then."""
        self._words = np.array(self._words, np.int64)

    def __call__(self):
        count = len(self._starts)
        complete = self._library.play(self._words, count)
        while complete < count:
            start = self._starts[complete]
            self._wait(int(self._words[start + 3]))  # the second argument of `sums_wait`
            complete += self._library.play(self._words[start:], count - complete)


class Inputs:
    """The positions in a program of numbers and addresses that change between replays."""

    def __init__(self):
        self._numbers, self._addresses, self._current = {}, {}, {}

    def add_number(self, name, words, index):
        """Let `set_number(name, value)` set an element of an array or a number of Calls."""
        self._numbers.setdefault(name, []).append((words, index))

    def add_address(self, name, words, index, offset):
        """Let `set_address(name, address)` set an address, `offset` bytes after the given one."""
        self._addresses.setdefault(name, []).append((words, index, offset))

    def set_number(self, name, value):
        """Set a number under the name that it was recorded with."""
        for words, index in self._numbers.get(name, ()):
            words[index] = value

    def set_address(self, name, address):
        """Set the address of an input array."""
        if self._current.get(name) != address:
            for words, index, offset in self._addresses.get(name, ()):
                words[index] = address + offset
            self._current[name] = address


class Program:
    """A recorded training step in parts, which the caller runs one after the other.

    Parameters
    ----------
    parts : list of list
        Functions without arguments and `Calls`, in order.
    inputs : Inputs
        The numbers and addresses that change.
    owners : object
        Keeps the memory of the program alive.
    """

    def __init__(self, parts, inputs, owners):
        self.parts, self.inputs, self._owners = parts, inputs, owners

    def run(self, part):
        """Run a part of the step."""
        for step in self.parts[part]:
            step()
