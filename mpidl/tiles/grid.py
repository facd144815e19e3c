"""Divide images into overlapping tiles, and weight the pixels of each tile.

Along an axis, the tiles start at multiples of the network's alignment. The first tile starts at the
first pixel, and the last one ends at the last pixel of the extended image, so the outer borders of
tiles are padded as those of the whole image. An image is extended to a multiple of the alignment by
copies of its last row and column.

If two neighbouring tiles share L pixels, the weight falls linearly from the first tile to the
second one over the L/4 pixels in the middle. Tiles do not contribute within 3/8 L of their inner
borders, where padding stands for the pixels outside a tile. The weights of a pixel add up to 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpidl.errors import UserError


class Tiling(NamedTuple):
    """Side and overlap of tiles, and the alignment of the network that reads them, in pixels."""

    side: int
    overlap: int
    alignment: int


def checked_tiling(
    alignment: int, tile: int, overlap: int | None, names: tuple[str, str] = ("tile", "overlap")
) -> Tiling:
    """Check the arguments of a user, and return a Tiling; the default overlap is an eighth.

    `names` are those of the arguments in messages. Raises UserError if the tile is not a multiple
    of the alignment, or smaller than twice the alignment, or if the overlap is above half the tile.
    """
    minimum = 2 * alignment
    if not _is_whole(tile) or tile < minimum or tile % alignment:
        raise UserError(
            f"{names[0]} must be a multiple of {alignment}, the factor by which layers of the "
            f"network shrink images, and at least {minimum}, got {tile}"
        )
    overlap = tile // 8 if overlap is None else overlap
    if not _is_whole(overlap) or not 0 <= overlap <= tile // 2:
        raise UserError(
            f"{names[1]} must be a whole number from 0 to {tile // 2}, half the tile, got {overlap}"
        )
    return Tiling(int(tile), int(overlap), alignment)


def _is_whole(value):
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class Axis:
    """The tiles along one axis of an image with `size` pixels along it.

    Attributes
    ----------
    side : int
        Pixels of a tile along the axis.
    origins : list of int
        First pixel of each tile.
    """

    def __init__(self, size: int, tiling: Tiling):
        self.size, alignment = size, tiling.alignment
        extended = -(-size // alignment) * alignment
        self.side = min(tiling.side, extended)
        step = (tiling.side - tiling.overlap) // alignment * alignment
        last = extended - self.side
        self.origins = [*range(0, last, step), last]

    def weights(self, i: int) -> np.ndarray:
        """Return the weights of the pixels of tile i, float32 (side,)."""
        weights = np.ones(self.side, np.float32)
        if i > 0:
            weights *= self._rise(i, self.origins[i])
        if i + 1 < len(self.origins):
            weights *= 1 - self._rise(i + 1, self.origins[i])
        return weights

    def _rise(self, i, first):
        """Return the ramp from tile i - 1 to tile i, for `side` pixels from pixel `first`."""
        before, start = self.origins[i - 1] + self.side, self.origins[i]
        centres = first + np.arange(self.side) + 0.5
        if before == start:  # no overlap
            return (centres > start).astype(np.float32)
        ramp = (centres - (before + start) / 2) / ((before - start) / 4) + 0.5
        return ramp.clip(0, 1).astype(np.float32)


class Grid:
    """The tiles of an image of `size` (H, W), in rows from the top, each from left to right."""

    def __init__(self, size: tuple[int, int], tiling: Tiling):
        self.rows, self.columns = (Axis(n, tiling) for n in size)

    def __len__(self) -> int:
        return len(self.rows.origins) * len(self.columns.origins)

    @property
    def tile_size(self) -> tuple[int, int]:
        """Size (h, w) of the tiles, which all have the same size."""
        return self.rows.side, self.columns.side

    def place(self, number: int) -> tuple[int, int]:
        """Return the row and the column of a tile."""
        return divmod(number, len(self.columns.origins))


class Blend:
    """The blended scores of an image, to which its tiles are added in order.

    Only the rows that the current row of tiles covers are in memory.
    """

    def __init__(self, grid: Grid):
        self.grid, self.count = grid, 0
        self.band: np.ndarray | None = None

    def add(self, scores: np.ndarray) -> tuple[int, np.ndarray] | None:
        """Add the scores (K, h, w) of the next tile.

        Return the number of the first row, and rows (K, m, W), that the last tile of a row of tiles
        completes.
        """
        rows, columns = self.grid.rows, self.grid.columns
        row, column = self.grid.place(self.count)
        self.count += 1
        if self.band is None:
            width = columns.origins[-1] + columns.side
            self.band = np.zeros((len(scores), rows.side, width), np.float32)
        down, across = rows.weights(row), columns.weights(column)
        y, x = _support(down), _support(across)  # an infinite score may have the weight 0
        weights, left = down[y, None] * across[x], columns.origins[column]
        self.band[:, y, left + x.start : left + x.stop] += scores[:, y, x] * weights
        if column + 1 < len(columns.origins):
            return None
        return self._completed(self.band, row)

    def _completed(self, band, row):
        """Remove the rows above the next row of tiles from the band, and return them."""
        rows, width = self.grid.rows, self.grid.columns.size
        first = rows.origins[row]
        is_last = row + 1 == len(rows.origins)
        count = rows.side if is_last else rows.origins[row + 1] - first
        completed = band[:, : min(count, rows.size - first), :width].copy()
        for plane in band:  # one at a time, because NumPy copies what overlaps
            plane[: rows.side - count] = plane[count:]
            plane[rows.side - count :] = 0
        return first, completed


def _support(weights):
    """Return the slice of the weights above 0."""
    positive = np.flatnonzero(weights)
    return slice(int(positive[0]), int(positive[-1]) + 1)
