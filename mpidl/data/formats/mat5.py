"""Files of MATLAB of version 5 (save -v7, -v6), read element by element.

SciPy reads them too, but crashes on some damaged files, and makes arrays of whatever sizes a cell
array claims. Here nothing is made that the file has not the bytes for. The form is that of
"MAT-File Format", The MathWorks: elements of a tag (type, bytes) and a value; a variable is a
matrix, an element of elements, which may be compressed as a whole.
"""

import itertools
import math
import os
import zlib
from typing import Literal, NamedTuple

import numpy as np

from mpidl.errors import UserError
from mpidl.files import unreadable
from mpidl.text import printable

RATIO = 1032  # of bytes to compressed bytes, at most
MOST_OF_TEXTS = 1 << 24  # bytes of a cell array
MOST_DIMENSIONS = 8
HEAD = 1 << 12  # bytes in which a matrix says its class, its size and its name
Order = Literal["little", "big"]
MATRIX, COMPRESSED = 14, 15  # types of elements; the numbers that a matrix's value may be of:
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8"}
NUMBERS |= {13: "u8"}
# Classes of matrices. One of doubles may be stored as bytes, where its values are.
CLASSES = ["", "cell", "struct", "object", "char", "sparse", "double", "single", "int8", "uint8"]
CLASSES += ["int16", "uint16", "int32", "uint32", "int64", "uint64", "function", "opaque"]


class Variable(NamedTuple):
    """A variable of a .mat file: its name, its size as MATLAB has it, its class."""

    name: str
    shape: tuple
    kind: str

    def __str__(self):
        return f"{printable(self.name)} ({'x'.join(map(str, self.shape))} {self.kind})"


def variables(path):
    """The variables of a file; no values are read for it."""
    found = []
    for place in _top(path):
        variable = _variable(path, place)
        if variable is not None and variable.name:
            found.append(variable)
    return found


def load(path, wanted):
    """{name: array} of variables that are numbers, of the sizes they were said to have."""
    return {variable.name: _found(path, variable, _numbers) for variable in wanted}


def texts(path, variable):
    """The texts of a cell array of row vectors of characters."""
    return _found(path, variable, _texts)


class _Place(NamedTuple):
    """An element of a file: the byte order, its type, where its value begins, how long it is."""

    order: Order
    kind: int
    start: int
    length: int


def _top(path):
    """The elements of a file; UserError where it is cut short."""
    found = []
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
                        f"{printable(path)}: expected {length} bytes at {at}, found the end of the "
                        "file: it is cut short"
                    )
                found.append(_Place(order, kind, at + 8, length))
                at += 8 + length
    except OSError as e:
        raise unreadable(path, e) from None
    return found


def _value(path, place, most):
    """The first `most` bytes of a matrix's elements, and whether there are no more."""
    try:
        with open(path, "rb") as file:
            file.seek(place.start)
            if place.kind != COMPRESSED:
                return file.read(min(place.length, most)), place.length <= most
            stream = zlib.decompressobj()
            data = stream.decompress(file.read(place.length), most + 8)
            return data[8:], stream.eof  # behind the tag of the matrix
    except (OSError, MemoryError, zlib.error) as e:
        raise unreadable(path, e) from None


def _variable(path, place):
    """The Variable at a place; None where there is something else."""
    if place.kind not in (MATRIX, COMPRESSED):
        return None
    data, _ = _value(path, place, HEAD)
    try:
        return _matrix(data, place.order)[0]
    except ValueError:
        raise UserError(
            f"{printable(path)}: expected a variable at {place.start}, found none"
        ) from None


def _found(path, variable, read):
    """What `read` makes of a variable's bytes; UserError where it is not what it was said to be."""
    for place in _top(path):
        if _variable(path, place) != variable:
            continue
        most = math.prod(variable.shape) * 8 if read is _numbers else MOST_OF_TEXTS
        if most > 8 * RATIO * place.length and read is _numbers:
            break
        data, whole = _value(path, place, most + HEAD)
        try:
            if whole:
                return read(data, place.order)
        except (ValueError, LookupError, MemoryError):
            break
    what = "class names as a cell array of texts" if read is _texts else "as many numbers"
    raise UserError(f"{printable(path)}: {variable}: expected {what}, found others")


def _elements(data, order):
    """Yield (type, value) of the elements that some bytes are made of."""
    at, data = 0, memoryview(data)
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
    """(Variable, the elements that follow) of a matrix; ValueError where it is none."""
    found = _elements(data, order)
    first = [bytes(value) for _, value in itertools.islice(found, 3)]
    if len(first) < 3 or len(first[0]) != 8:
        raise ValueError("cut short")
    flags = int.from_bytes(first[0][:4], order)
    kind = CLASSES[flags & 0xFF] if flags & 0xFF < len(CLASSES) else "unknown"
    if kind == "opaque":  # which has a name in place of a size
        return Variable(_name(first[1]), (), kind), found
    if len(first[1]) % 4 or not 8 <= len(first[1]) <= 4 * MOST_DIMENSIONS:
        raise ValueError("too many dimensions")
    sizes = np.frombuffer(first[1], "<i4" if order == "little" else ">i4").tolist()
    if min(sizes) < 0:
        raise ValueError("negative sizes")
    kind = "logical" if flags & 0x0200 else "complex" if flags & 0x0800 else kind
    return Variable(_name(first[2]), tuple(sizes), kind), found


def _name(data):
    return data.decode("ascii", "backslashreplace")


def _numbers(data, order):
    variable, rest = _matrix(data, order)
    coding, value = next(rest, (0, b""))
    stored = np.dtype(NUMBERS[coding]).newbyteorder(order[0])
    if len(value) != math.prod(variable.shape) * stored.itemsize:
        raise ValueError("another size")
    held = {"double": "f8", "single": "f4", "logical": "u1"}.get(variable.kind, variable.kind)
    with np.errstate(invalid="ignore"):
        found = np.frombuffer(value, stored).astype(held, copy=False)
    return found.reshape(variable.shape, order="F")


def _texts(data, order):
    variable, cells = _matrix(data, order)
    if variable.kind != "cell":
        raise ValueError("no cell array")
    found = [_text(value, order) for _, value in cells]
    if len(found) != math.prod(variable.shape):
        raise ValueError("another size")
    return found


def _text(data, order):
    variable, rest = _matrix(data, order)
    if variable.kind != "char":
        raise ValueError("no characters")
    # Characters are bytes of UTF-8, or UTF-16 or UTF-32; a text of none may have no value at all.
    coding, value = next(rest, (1, b""))
    wide = {4: "utf-16", 17: "utf-16", 18: "utf-32"}.get(coding)
    return bytes(value).decode("utf-8" if wide is None else f"{wide}-{order[0]}e")
