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
import zlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from mpidl.data.paths import open_binary, reading, stamp_of
from mpidl.errors import UserError
from mpidl.text import printable

T = TypeVar("T")
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


class Element(NamedTuple):
    """An element of a file: its byte order, its type, and the offset and length of its value."""

    order: Order
    kind: int
    start: int
    length: int


class Mat5:
    """A version 5 file. Construction lists the variables without reading their values.

    Raises UserError if the file is truncated or damaged.
    """

    def __init__(self, path: str):
        self.path = path
        self._elements: dict[Variable, Element] = {}
        with reading(path):
            for element in self._top():
                data, _ = self._value(element, HEAD)
                try:
                    variable, _ = _matrix(data, element.order)
                except ValueError:
                    raise UserError(
                        f"{printable(path)}: expected a variable at {element.start}, found none"
                    ) from None
                if variable.name:
                    self._elements.setdefault(variable, element)
        self.variables = list(self._elements)

    def numbers(self, variable: Variable) -> np.ndarray:
        """Read a numeric variable. Raise UserError if it is too large for the file, or damaged."""
        nbytes = math.prod(variable.shape) * 8
        if nbytes <= 8 * RATIO * self._elements[variable].length:
            values = self._read(variable, nbytes, _numbers)
            if values is not None:
                return values
        raise UserError(
            f"{printable(self.path)}: {variable}: expected as many numbers, found others"
        )

    def images(self, variable: Variable) -> np.ndarray:
        """Read H x W x C x N or H x W x N pixels as (n, C, H, W), floats as float32."""
        pixels = self.numbers(variable)
        if pixels.dtype != np.uint8:
            with np.errstate(over="ignore"):  # `read_images` reports images with infinities
                pixels = pixels.astype(np.float32)
        pixels = pixels if pixels.ndim == 4 else pixels[:, :, None]
        return np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))

    def texts(self, variable: Variable) -> list[str]:
        """Read a cell array of character vectors. Raise UserError if it holds anything else."""
        texts = self._read(variable, MAX_TEXTS, _texts)
        if texts is None:
            raise UserError(
                f"{printable(self.path)}: {variable}: expected class names as a cell array of "
                "character vectors, found others"
            )
        return texts

    def _read(self, variable: Variable, nbytes: int, read: Callable[[bytes, Order], T]) -> T | None:
        """Call ``read(data, order)`` on the bytes of a variable. Return None if it fails."""
        element = self._elements[variable]
        with reading(self.path):
            data, is_complete = self._value(element, nbytes + HEAD)
        try:
            return read(data, element.order) if is_complete else None
        except (ValueError, LookupError, MemoryError):
            return None

    def _top(self) -> Iterator[Element]:
        """Yield the matrices of the file. Raise UserError if the file is truncated."""
        size, offset = stamp_of(self.path).size, 128
        with open_binary(self.path) as file:
            order: Order = "little" if file.read(128)[126:] == b"IM" else "big"
            while offset < size:
                file.seek(offset)
                head = file.read(8)
                kind, length = (int.from_bytes(head[i : i + 4], order) for i in (0, 4))
                if len(head) < 8 or offset + 8 + length > size:
                    raise UserError(
                        f"{printable(self.path)}: expected {length} bytes at {offset}, found the "
                        "end of the file: it is truncated"
                    )
                if kind in (MATRIX, COMPRESSED):
                    yield Element(order, kind, offset + 8, length)
                offset += 8 + length

    def _value(self, element: Element, max_bytes: int) -> tuple[bytes, bool]:
        """Return the first bytes of a matrix, decompressed, and whether the matrix is complete."""
        with open_binary(self.path) as file:
            file.seek(element.start)
            if element.kind != COMPRESSED:
                return file.read(min(element.length, max_bytes)), element.length <= max_bytes
            stream = zlib.decompressobj()
            data = stream.decompress(file.read(element.length), max_bytes + 8)
            return data[8:], stream.eof  # skip the tag of the matrix


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
    result = [_text(value, order) for _, value in cells]
    if variable.kind != "cell" or len(result) != math.prod(variable.shape):
        raise ValueError("no cell array of this size")
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
