"""Arithmetic on whole Arrays and copies of many of them, each in one launch."""

import numpy as np

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.array import Array
from mpidl.fold import Late

THREADS = 256
WORD = 4  # bytes, what is copied at a time
KINDS = {"f4": "float", "f8": "double"}


def _blocks(n):
    """How many blocks of threads go through n elements."""
    return min(-(-n // THREADS), 32 * launching.device().processors)


def _kind(x):
    kind = KINDS.get(x.dtype.str[1:])
    if kind is None:
        raise TypeError(f"expected float32 or float64, got {x}")
    return kind


def add(a, b):
    """a + b, of one shape, type and order in memory."""
    if (a.shape, a.dims, a.order, a.dtype) != (b.shape, b.dims, b.order, b.dtype):
        raise ValueError(f"cannot add {b} to {a}: they differ in shape, type or order in memory")
    y = array.empty_like(a)
    launching.launch(f"add_{_kind(a)}", _blocks(a.size), THREADS, a, b, y, a.size)
    return y


def scaled(x, factor):
    """x * factor, a number or a fold.Late, rounded to x's type before."""
    number, late = (factor.factor, factor.array) if isinstance(factor, Late) else (factor, None)
    y, kind = array.empty_like(x), _kind(x)
    launching.launch(f"scaled_{kind}", _blocks(x.size), THREADS, x, float(number), late, y, x.size)
    return y


def cast(x, dtype):
    """A float64 Array rounded to float32."""
    if (x.dtype, np.dtype(dtype)) != (np.float64, np.float32):
        raise TypeError(f"no kernel makes {np.dtype(dtype)} of {x}")
    y = array.empty_like(x, dtype)
    launching.launch("cast_double_float", _blocks(x.size), THREADS, x, y, x.size)
    return y


def zeros_like(x):
    """Zeros of the same shape, type and order in memory."""
    words = -(-x.nbytes // WORD)
    made = launching.empty((words,), np.int32)
    launching.launch("zero_words", _blocks(words), THREADS, made, words)
    return Array(made.buffer, x.dtype, x.shape, x.dims, x.order)


def pack(matrices, rows, dtype=np.float32):
    """(rows, sum of widths): row i is the rows i of the matrices (rows, width), side by side."""
    packed = launching.empty((rows, sum(m.shape[1] for m in matrices)), dtype)
    pieces, at = [], 0
    for matrix in matrices:
        if len(matrix) != rows or matrix.dtype != packed.dtype:
            raise ValueError(f"expected {rows} rows of {packed.dtype}, got {matrix}")
        part, words = packed.part(at, matrix.shape[1:]), _pitch(matrix)
        pieces.append((matrix, part, rows, words, words, _pitch(packed)))
        at += matrix.shape[1]
    copy(pieces)
    return packed


def _pitch(matrix):
    """Words from row to row of a matrix."""
    return matrix.shape[1] * matrix.dtype.itemsize // WORD


def copy(pieces):
    """Copy pieces (source, destination, rows, words a row, words from row to row of the source, and
    of the destination) of Arrays, words of 4 bytes, all in one launch."""
    pieces = [piece for piece in pieces if piece[2] and piece[3]]
    if not pieces:
        return
    most = max(words for *_, words, _, _ in pieces)
    blocks = min(-(-most // (4 * THREADS)), -(-32 * launching.device().processors // len(pieces)))
    launching.launch("copy_pieces", (blocks, len(pieces)), THREADS, launching.table(pieces))
