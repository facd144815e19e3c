"""Test the origins of tiles, their weights and the sums of weighted scores."""

import numpy as np
import pytest
from image_sets import refusal
from single_rank import numbers

from mpidl.tiles.grid import Axis, Blend, Grid, Tiling, checked_tiling

TILINGS = [Tiling(64, 8, 8), Tiling(64, 32, 8), Tiling(48, 24, 16), Tiling(24, 12, 8)]
TILINGS += [Tiling(40, 0, 4), Tiling(40, 13, 4), Tiling(7, 3, 1), Tiling(2, 1, 1)]
SIZES = (1, 5, 63, 64, 65, 72, 100, 129, 333)


def padded_size(size, tiling):
    return -(-size // tiling.alignment) * tiling.alignment


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_tiles_cover_the_image(tiling):
    for size in SIZES:
        axis = Axis(size, tiling)
        assert axis.origins == sorted(set(axis.origins)) and axis.origins[0] == 0
        assert axis.origins[-1] + axis.side == padded_size(size, tiling)
        assert all(origin % tiling.alignment == 0 for origin in axis.origins)
        if len(axis.origins) > 1:
            assert axis.side == tiling.side
            assert tiling.side - np.diff(axis.origins).max() >= tiling.overlap


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_weights_add_up_to_1(tiling):
    """At most two tiles contribute to a pixel, none within 3/8 of the overlap at its borders."""
    for size in SIZES:
        axis = Axis(size, tiling)
        total = np.zeros(padded_size(size, tiling), np.float32)
        count = np.zeros(len(total), int)
        for i, origin in enumerate(axis.origins):
            weights = axis.weights(i)
            total[origin : origin + axis.side] += weights
            count[origin : origin + axis.side] += weights > 0
            if i > 0:
                margin = 3 * (axis.origins[i - 1] + axis.side - origin) // 8
                assert not weights[:margin].any()
        np.testing.assert_allclose(total, 1, rtol=0, atol=1e-7)
        assert 1 <= count.min() <= count.max() <= 2


def test_the_ramp():
    """The formula of the documentation: a line over the middle quarter of 32 shared pixels."""
    axis = Axis(96, Tiling(64, 32, 8))
    assert axis.origins == [0, 32]
    ramp = (np.arange(8) + 0.5) / 8
    np.testing.assert_array_equal(axis.weights(1), [*np.zeros(12), *ramp, *np.ones(44)])
    np.testing.assert_array_equal(axis.weights(0), [*np.ones(44), *ramp[::-1], *np.zeros(12)])


@pytest.mark.parametrize("size", [(5, 100), (129, 64), (72, 333)])
@pytest.mark.parametrize("tiling", TILINGS[:2], ids=str)
def test_blended_scores(size, tiling):
    """The oracle adds all weighted tiles to a float64 image.

    Infinite scores with the weight 0 have no effect.
    """
    grid = Grid(size, tiling)
    height, width = (padded_size(n, tiling) for n in size)
    expected, blended = np.zeros((3, height, width)), np.full((3, *size), np.nan)
    blend, numbers_of_rows = Blend(grid), []
    for i in range(len(grid)):
        row, column = grid.place(i)
        scores = numbers(f"tile {i}", 3, *grid.tile_size, dtype=np.float32)
        weights = np.outer(grid.rows.weights(row), grid.columns.weights(column)).astype(np.float64)
        top, left = grid.rows.origins[row], grid.columns.origins[column]
        place = np.s_[:, top : top + grid.rows.side, left : left + grid.columns.side]
        expected[place] += scores * weights
        band = blend.add(np.where(weights == 0, np.inf, scores))
        if band is not None:
            first, rows = band
            blended[:, first : first + rows.shape[1]] = rows
            numbers_of_rows.append(rows.shape[1])
    np.testing.assert_allclose(blended, expected[:, : size[0], : size[1]], rtol=0, atol=1e-6)
    assert sum(numbers_of_rows) == size[0] and len(numbers_of_rows) == len(grid.rows.origins)


def test_refusals():
    assert checked_tiling(8, 512, None) == (512, 64, 8)
    for arguments, text in (
        ((8, 500, None), "tile must be a multiple of 8, the factor by which layers of the network"),
        ((8, 8, None), "tile must be a multiple of 8, the factor by which layers of the network"),
        ((8, 64.0, None), "tile must be a multiple of 8"),
        ((1, True, None), "tile must be a multiple of 1"),
        ((8, 64, 33), "overlap must be a whole number from 0 to 32, half the tile, got 33"),
        ((8, 64, -1), "overlap must be a whole number from 0 to 32, half the tile, got -1"),
        ((8, 64, 8.5), "overlap must be a whole number from 0 to 32, half the tile, got 8.5"),
    ):
        assert refusal(checked_tiling, *arguments).startswith(text)
