"""Files of MATLAB of version 5 (save -v7, -v6): numbers by SciPy, cell arrays of texts by hand.

SciPy makes arrays of whatever sizes a cell array claims, which a damaged one may do without end.
The form is that of "MAT-File Format", The MathWorks: elements of a tag (type, bytes) and a value.
"""

import itertools
import math
import os
import zlib
from typing import Literal, NamedTuple

import numpy as np

from mpidl.data.datastore import shown
from mpidl.data.files import unreadable
from mpidl.errors import UserError

RATIO = 1032  # of what is held to what is stored: no deflate packs tighter
MOST_OF_TEXTS = 1 << 24  # bytes of a cell array
MATRIX, COMPRESSED = 14, 15  # types of elements
CELL, CHAR = 1, 4  # classes of matrices
Order = Literal["little", "big"]
HEAD = 1 << 12  # bytes in which a matrix says its class and its name


class Variable(NamedTuple):
    """A variable of a .mat file: its name, its size as MATLAB has it, its class."""

    name: str
    shape: tuple
    kind: str

    def __str__(self):
        return f"{shown(self.name)} ({'x'.join(map(str, self.shape))} {self.kind})"


def variables(path):
    """The variables of a file, by SciPy, which reads no values for it."""
    io = _scipy(path)
    for _ in _top(path):  # which refuses a file that is cut short
        pass
    try:
        found = io.whosmat(path)
    except Exception as e:  # whatever SciPy makes of damaged bytes
        raise unreadable(path, e) from None
    return [Variable(str(n), tuple(int(size) for size in s), str(k)) for n, s, k in found]


def load(path, wanted):
    """{name: array} of variables that are numbers, each of the size it was said to have."""
    io = _scipy(path)
    size = os.stat(path).st_size
    for variable in wanted:
        if math.prod(variable.shape) > RATIO * size:
            raise UserError(
                f"{shown(path)}: expected the values of {variable}, found a file of {size} bytes: "
                "it is cut short"
            )
    try:
        held = io.loadmat(path, variable_names=[variable.name for variable in wanted])
    except Exception as e:  # whatever SciPy makes of damaged bytes
        raise unreadable(path, e) from None
    for variable in wanted:
        value = held.get(variable.name)
        if not (
            isinstance(value, np.ndarray)
            and value.shape == variable.shape
            and value.dtype.kind in "biuf"
        ):
            raise UserError(f"{shown(path)}: expected the values of {variable}, found others")
    return held


def texts(path, variable):
    """The texts of a cell array of row vectors of characters."""
    problem = UserError(
        f"{shown(path)}: {shown(variable.name)}: expected class names as a cell array of texts"
    )
    for order, kind, start, length in _top(path):
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(min(length, MOST_OF_TEXTS))
        try:
            if kind == COMPRESSED:  # its tag comes first, then the matrix
                if _matrix(zlib.decompressobj().decompress(data, HEAD)[8:], order)[1] == (
                    variable.name
                ):
                    data = zlib.decompressobj().decompress(data, MOST_OF_TEXTS)[8:]
                    return _texts(data, order)
            elif kind == MATRIX and _matrix(data[:HEAD], order)[1] == variable.name:
                return _texts(data, order)
        except (ValueError, LookupError, zlib.error):
            raise problem from None
    raise problem


def _top(path):
    """Yield (byte order, type, where, bytes) of each element of a file; UserError if it is cut."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            order: Order = "little" if file.read(128)[126:] == b"IM" else "big"
            at = 128
            while at < size:
                file.seek(at)
                head = file.read(8)
                kind, length = (int.from_bytes(head[i : i + 4], order) for i in (0, 4))
                if len(head) < 8 or at + 8 + length > size:
                    raise UserError(
                        f"{shown(path)}: expected {length} bytes at {at}, found the end of the "
                        "file: it is cut short"
                    )
                yield order, kind, at + 8, length
                at += 8 + length
    except OSError as e:
        raise unreadable(path, e) from None


def _elements(data, order):
    """Yield (type, value) of the elements that some bytes are made of."""
    at = 0
    while at + 8 <= len(data):
        word, length = (int.from_bytes(data[at + i : at + i + 4], order) for i in (0, 4))
        if word >> 16:  # up to four bytes in the tag itself
            length = word >> 16
            yield word & 0xFFFF, data[at + 4 : at + 4 + min(length, 4)]
            at += 8
        else:
            yield word, data[at + 8 : at + 8 + length]
            at += 8 + -(-length // 8) * 8


def _matrix(data, order):
    """(class, name, the elements that follow) of a matrix."""
    found = _elements(data, order)
    first = [value for _, value in itertools.islice(found, 3)]
    if len(first) < 3:
        raise ValueError("cut short")
    flags, _, name = first
    return int.from_bytes(flags[:4], order) & 0xFF, name.decode("ascii"), found


def _texts(data, order):
    kind, _, cells = _matrix(data, order)
    if kind != CELL:
        raise ValueError("no cell array")
    return [_text(value, order) for _, value in cells]


def _text(data, order):
    kind, _, rest = _matrix(data, order)
    if kind != CHAR:
        raise ValueError("no characters")
    # Characters are bytes of UTF-8, or UTF-16 or UTF-32; a text of none may have no value at all.
    coding, value = next(rest, (1, b""))
    wide = {4: "utf-16", 17: "utf-16", 18: "utf-32"}.get(coding)
    return value.decode("utf-8" if wide is None else f"{wide}-{order[0]}e")


def _scipy(path):
    try:
        import scipy.io
    except ImportError:
        raise UserError(
            f"{shown(path)}: files before version 7.3 need SciPy: pip install scipy, or in MATLAB "
            "save -v7.3"
        ) from None
    return scipy.io
