"""Read version 5 MATLAB .mat files (save -v7, -v6) element by element.

SciPy also reads these files, but it crashes on some damaged files and allocates cell arrays of any
size that a file claims. In this module, the size of the file limits allocations. The format is
described in "MAT-File Format", The MathWorks. A file is a sequence of elements. An element consists
of a tag (type, number of bytes) and a value. A variable is stored as a matrix, an element that
contains other elements and may be compressed.
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from mpidl.data.storage.paths import open_binary, stamp_of
from mpidl.errors import UserError
from mpidl.files import unreadable
from mpidl.text import printable

RATIO = 1032  # maximum compression ratio of deflate
MAX_TEXTS = 1 << 24  # maximum size of a cell array in bytes
MOST_DIMENSIONS = 8
HEAD = 1 << 12  # number of leading bytes of a matrix that contain its class, size and name
Order = Literal["little", "big"]
MATRIX, COMPRESSED = 14, 15  # element types; NUMBERS lists the numeric element types
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8"}
NUMBERS |= {13: "u8"}
# Names of matrix classes, by class number. The stored type may be smaller than the class.
CLASSES = ["", "cell", "struct", "object", "char", "sparse", "double", "single", "int8", "uint8"]
CLASSES += ["int16", "uint16", "int32", "uint32", "int64", "uint64", "function", "opaque"]


class Variable(NamedTuple):
    """A variable of a .mat file: its name, its dimensions in MATLAB's order and its class."""

    name: str
    shape: tuple[int, ...]
    kind: str

    def __str__(self) -> str:
        return f"{printable(self.name)} ({'x'.join(map(str, self.shape))} {self.kind})"


def variables(path: str | os.PathLike) -> list[Variable]:
    """List the variables of a file without reading their values."""
    result = []
    for element in _top(path):
        variable = _variable(path, element)
        if variable is not None and variable.name:
            result.append(variable)
    return result


def load(path: str | os.PathLike, numeric: Sequence[Variable]) -> dict[str, np.ndarray]:
    """Read numeric variables and return {name: array}.

    Raises UserError if the file is damaged, or has no variable with the given name, size and class.
    """
    return {variable.name: _read(path, variable, _numbers) for variable in numeric}


def texts(path: str | os.PathLike, variable: Variable) -> list[str]:
    """Read a cell array of character vectors and return them as strings.

    Raises UserError if a cell is not a character array, or if the file is damaged.
    """
    return _read(path, variable, _texts)


class _Element(NamedTuple):
    """An element of a file: its byte order, its type, and the offset and length of its value."""

    order: Order
    kind: int
    start: int
    length: int


def _top(path):
    """List the top-level elements of a file. Raise UserError if the file is truncated."""
    elements = []
    try:
        with open_binary(path) as file:
            size = stamp_of(path).size
            order: Order = "little" if file.read(128)[126:] == b"IM" else "big"
            offset = 128
            while offset < size:
                file.seek(offset)
                head = file.read(8)
                kind, length = (int.from_bytes(head[i : i + 4], order) for i in (0, 4))
                if len(head) < 8 or offset + 8 + length > size:
                    raise UserError(
                        f"{printable(path)}: expected {length} bytes at {offset}, found the end "
                        "of the file: it is truncated"
                    )
                elements.append(_Element(order, kind, offset + 8, length))
                offset += 8 + length
    except OSError as e:
        raise unreadable(path, e) from None
    return elements


def _value(path, element, max_bytes):
    """Return the first `max_bytes` bytes of a matrix, and whether the matrix is complete.

    A compressed matrix is decompressed.
    """
    try:
        with open_binary(path) as file:
            file.seek(element.start)
            if element.kind != COMPRESSED:
                return file.read(min(element.length, max_bytes)), element.length <= max_bytes
            stream = zlib.decompressobj()
            data = stream.decompress(file.read(element.length), max_bytes + 8)
            return data[8:], stream.eof  # skip the tag of the matrix
    except (OSError, MemoryError, zlib.error) as e:
        raise unreadable(path, e) from None


def _variable(path, element):
    """Return the Variable that an element holds, or None if the element is not a matrix."""
    if element.kind not in (MATRIX, COMPRESSED):
        return None
    data, _ = _value(path, element, HEAD)
    try:
        return _matrix(data, element.order)[0]
    except ValueError:
        raise UserError(
            f"{printable(path)}: expected a variable at {element.start}, found none"
        ) from None


def _read(path, variable, read):
    """Call ``read(data, order)`` on the bytes of a variable and return the result.

    `read` is `_numbers` or `_texts`. Raises UserError if the variable is missing, is too large for
    the file, or has a class that `read` rejects.
    """
    for element in _top(path):
        if _variable(path, element) != variable:
            continue
        max_bytes = math.prod(variable.shape) * 8 if read is _numbers else MAX_TEXTS
        if max_bytes > 8 * RATIO * element.length and read is _numbers:
            break
        data, complete = _value(path, element, max_bytes + HEAD)
        try:
            if complete:
                return read(data, element.order)
        except (ValueError, LookupError, MemoryError):
            break
    expected = (
        "class names as a cell array of character vectors" if read is _texts else "as many numbers"
    )
    raise UserError(f"{printable(path)}: {variable}: expected {expected}, found others")


def _elements(data, order):
    """Yield (type, value) of each element in the bytes of a matrix."""
    offset, data = 0, memoryview(data)
    while offset + 8 <= len(data):
        word, length = (int.from_bytes(data[offset + i : offset + i + 4], order) for i in (0, 4))
        if word >> 16:  # a short element: the tag itself holds a value of up to four bytes
            length = word >> 16
            yield word & 0xFFFF, data[offset + 4 : offset + 4 + min(length, 4)]
            offset += 8
        else:
            yield word, data[offset + 8 : offset + 8 + length]
            offset += 8 + -(-length // 8) * 8


def _matrix(data, order):
    """Parse the flags, sizes and name of a matrix to a Variable, and return it with an iterator
    over the remaining elements. Raises ValueError if the bytes do not encode a matrix.
    """
    elements = _elements(data, order)
    first = [bytes(value) for _, value in itertools.islice(elements, 3)]
    if len(first) < 3 or len(first[0]) != 8:
        raise ValueError("truncated")
    flags = int.from_bytes(first[0][:4], order)
    kind = CLASSES[flags & 0xFF] if flags & 0xFF < len(CLASSES) else "unknown"
    if kind == "opaque":  # the second element of an opaque matrix holds a name
        return Variable(_name(first[1]), (), kind), elements
    if len(first[1]) % 4 or not 8 <= len(first[1]) <= 4 * MOST_DIMENSIONS:
        raise ValueError("too many dimensions")
    sizes = np.frombuffer(first[1], "<i4" if order == "little" else ">i4").tolist()
    if min(sizes) < 0:
        raise ValueError("negative sizes")
    kind = "logical" if flags & 0x0200 else "complex" if flags & 0x0800 else kind
    return Variable(_name(first[2]), tuple(sizes), kind), elements


def _name(data):
    return data.decode("ascii", "backslashreplace")


def _numbers(data, order):
    """Convert the bytes of a numeric matrix to an array. Raise ValueError for a wrong length."""
    variable, rest = _matrix(data, order)
    coding, value = next(rest, (0, b""))
    stored = np.dtype(NUMBERS[coding]).newbyteorder(order[0])
    if len(value) != math.prod(variable.shape) * stored.itemsize:
        raise ValueError("another size")
    dtype = {"double": "f8", "single": "f4", "logical": "u1"}.get(variable.kind, variable.kind)
    with np.errstate(invalid="ignore"):
        flat = np.frombuffer(value, stored).astype(dtype, copy=False)
    return flat.reshape(variable.shape, order="F")


def _texts(data, order):
    """Convert the bytes of a cell array to a list of strings.

    Raises ValueError if the bytes do not encode a cell array of character vectors.
    """
    variable, cells = _matrix(data, order)
    if variable.kind != "cell":
        raise ValueError("no cell array")
    result = [_text(value, order) for _, value in cells]
    if len(result) != math.prod(variable.shape):
        raise ValueError("another size")
    return result


def _text(data, order):
    """Convert the bytes of a character matrix to a string."""
    variable, rest = _matrix(data, order)
    if variable.kind != "char":
        raise ValueError("no characters")
    # Characters are UTF-8, UTF-16 or UTF-32. An empty string may have no value.
    coding, value = next(rest, (1, b""))
    wide = {4: "utf-16", 17: "utf-16", 18: "utf-32"}.get(coding)
    return bytes(value).decode("utf-8" if wide is None else f"{wide}-{order[0]}e")
