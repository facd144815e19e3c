"""Scale an Array in one kernel launch, and copy many parts of Arrays in one launch."""

import numpy as np

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.launching import THREADS
from mpidl.core.fold import Late


def scaled(x, factor):
    """Return x * factor.

    The factor, a scalar or a `fold.Late`, is rounded to the dtype of x before the multiplication.
    """
    number, late = scale_of(factor)
    y, blocks = array.empty_like(x), launching.blocks_of_threads(x.size)
    name = f"scaled_{launching.kind_of(x)}"
    launching.launch(name, blocks, THREADS, x, number, late, y, x.size)
    return y


def scale_of(scale):
    """Split a scale into (constant factor, array of the variable factor or None).

    The scale is a number or a `Late`. A Late is a factor that changes between replays of a recorded
    step and is stored in an array on the device.
    """
    return (scale.factor, scale.array) if isinstance(scale, Late) else (float(scale), None)


def pack(matrices, rows, dtype=np.float32):
    """Concatenate matrices (rows, width) along the columns; return an Array (rows, sum of widths).

    Raise ValueError if a matrix does not have this number of rows or this dtype.
    """
    packed = launching.empty((rows, sum(m.shape[1] for m in matrices)), dtype)
    pieces, column = [], 0
    for matrix in matrices:
        if len(matrix) != rows or matrix.dtype != packed.dtype:
            raise ValueError(f"expected {rows} rows of {packed.dtype}, got {matrix}")
        part, width = packed.part(column, matrix.shape[1:]), matrix.shape[1]
        pieces.append((matrix, part, rows, width, width, packed.shape[1]))
        column += width
    copy(pieces)
    return packed


def copy(pieces):
    """Copy several parts of Arrays in one launch.

    A piece is (source, destination, rows, width, source pitch, destination pitch). The width is the
    number of elements of a row, and a pitch the distance between rows, in elements.
    """
    table = [_row(*piece) for piece in pieces if piece[2] and piece[3]]
    if table:
        longest = max(rows * width for _, _, rows, _, width, _, _ in table)
        limit = -(-32 * launching.device().processors // len(table))
        grid = min(-(-longest // (4 * THREADS)), limit), len(table)
        launching.launch("copy_pieces", grid, THREADS, launching.table(table))


def _row(source, destination, rows, *widths):
    """Return a row of the table of copy_pieces, which moves 16, 4 or 2 aligned bytes at once."""
    sizes = [width * source.dtype.itemsize for width in widths]
    places = *sizes, source.offset, destination.offset
    unit = next(n for n in (16, 4, 2) if all(place % n == 0 for place in places))
    return [source, destination, rows, unit, *(size // unit for size in sizes)]
