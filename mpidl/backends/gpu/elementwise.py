"""Scale an Array in one kernel launch, and copy many parts of Arrays in one launch."""

import numpy as np

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.launching import THREADS, WORD
from mpidl.core.fold import Late


def scaled(x, factor):
    """Return x * factor.

    The factor, a scalar or a `fold.Late`, is rounded to the dtype of x before the multiplication.
    """
    number, late = (factor.factor, factor.array) if isinstance(factor, Late) else (factor, None)
    y, blocks = array.empty_like(x), launching.blocks_of_threads(x.size)
    name = f"scaled_{launching.kind_of(x)}"
    launching.launch(name, blocks, THREADS, x, float(number), late, y, x.size)
    return y


def pack(matrices, rows, dtype=np.float32):
    """Concatenate matrices (rows, width) along the columns; return an Array (rows, sum of widths).

    Raise ValueError if a matrix does not have this number of rows or this dtype.
    """
    packed = launching.empty((rows, sum(m.shape[1] for m in matrices)), dtype)
    pieces, column = [], 0
    for matrix in matrices:
        if len(matrix) != rows or matrix.dtype != packed.dtype:
            raise ValueError(f"expected {rows} rows of {packed.dtype}, got {matrix}")
        part, words = packed.part(column, matrix.shape[1:]), _pitch(matrix)
        pieces.append((matrix, part, rows, words, words, _pitch(packed)))
        column += matrix.shape[1]
    copy(pieces)
    return packed


def _pitch(matrix):
    """Return the distance between the rows of a matrix, in words of 4 bytes."""
    return matrix.shape[1] * matrix.dtype.itemsize // WORD


def copy(pieces):
    """Copy several parts of Arrays in one launch.

    Parameters
    ----------
    pieces : list of (source, destination, rows, words, source pitch, destination pitch)
        Source and destination are Arrays. A part consists of `rows` rows of `words` words of 4
        bytes. A pitch is the distance between rows, in words.
    """
    pieces = [piece for piece in pieces if piece[2] and piece[3]]
    if not pieces:
        return
    longest = max(words for *_, words, _, _ in pieces)
    blocks = min(
        -(-longest // (4 * THREADS)), -(-32 * launching.device().processors // len(pieces))
    )
    launching.launch("copy_pieces", (blocks, len(pieces)), THREADS, launching.table(pieces))
