"""Predict pictures tile by tile, on any number of ranks.

The tiles of the pictures are the images of mini-batches, and rank 0 blends their scores in order,
so the results have the same bytes on any number of ranks.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpidl.core.blocks import LANES
from mpidl.data.datastore import Datastore, Indices
from mpidl.data.transforms.preprocess import AS_IT_IS, Preprocess, preprocessed
from mpidl.errors import UserError
from mpidl.nn import Network
from mpidl.nn.summary import times
from mpidl.ranks.world import World
from mpidl.tiles.grid import Blend, Grid, Tiling, checked_tiling
from mpidl.tiles.networks import alignment_of, for_tiles
from mpidl.tiles.pictures import Picture, pictures_of

# ``run(net, datastore)`` yields (indices, scores) of each mini-batch on rank 0, and (None, None) on
# other ranks, as `predict.by_batch` does.
Run: TypeAlias = Callable[[Network, Datastore], Iterable[tuple[Any, Any]]]


class Band(NamedTuple):
    """Blended scores (K, m, W) of consecutive rows of a picture, from row `first`."""

    picture: int
    first: int
    scores: np.ndarray


class Tiles(Datastore):
    """A datastore of the tiles of pictures, whose tiles have the same size."""

    def __init__(self, pictures: Sequence[Picture], grids: Sequence[Grid]):
        self.pictures, self.grids = pictures, grids
        self.ends = list(itertools.accumulate(map(len, grids)))
        self.image_shape = (pictures[0].shape[0], *grids[0].tile_size)
        self.dtype = pictures[0].dtype

    def __len__(self) -> int:
        return self.ends[-1]

    def place(self, i: int) -> tuple[int, int, int]:
        """Return the numbers of a tile's picture, row and column."""
        picture = bisect.bisect_right(self.ends, i)
        grid = self.grids[picture]
        return picture, *grid.place(i - self.ends[picture] + len(grid))

    def read(self, indices: Indices) -> np.ndarray:
        tiles = np.empty((len(indices), *self.image_shape), self.dtype)
        for tile, i in zip(tiles, indices, strict=True):
            number, row, column = self.place(int(i))
            picture, grid = self.pictures[number], self.grids[number]
            top, left = grid.rows.origins[row], grid.columns.origins[column]
            rows = slice(top, min(top + grid.rows.side, picture.shape[1]))
            columns = slice(left, min(left + grid.columns.side, picture.shape[2]))
            pixels = picture.window(rows, columns)
            height, width = pixels.shape[1:]
            tile[:, :height, :width] = pixels
            tile[:, :height, width:] = pixels[:, :, -1:]
            tile[:, height:] = tile[:, height - 1 : height]
        return tiles

    def name(self, i: int) -> str:
        picture, row, column = self.place(i)
        return f"{self.pictures[picture].name}, tile {row},{column}"

    def describe(self) -> str:
        count = len(self.pictures)
        noun = "image" if count == 1 else "images"
        return f"{count} {noun} in {len(self)} tiles of {times(self.image_shape)}"


class TiledNetwork:
    """A network with the tiles that it reads. `names` are those of the arguments in messages."""

    def __init__(
        self,
        net: Network,
        tile: int,
        overlap: int | None,
        names: tuple[str, str] = ("tile", "overlap"),
    ):
        self.net = net
        self.tiling: Tiling = checked_tiling(alignment_of(net, names[0]), tile, overlap, names)

    def check(self, picture: Picture, preprocess: Preprocess = AS_IT_IS) -> None:
        """Raise UserError if a picture does not have the channels that the network reads."""
        channels = preprocess.image_shape(picture.shape)[0]
        if channels != self.net.input_shape[0]:
            raise UserError(
                f"{picture.name}: expected an image of {self.net.input_shape[0]} channels, as in "
                f"training, found {channels} (--colour, or net.preprocess, converts images)"
            )

    def bands(
        self, pictures: Sequence[Picture], run: Run, preprocess: Preprocess = AS_IT_IS
    ) -> Generator[list[Band], None, None]:
        """Yield the completed bands after each mini-batch; ranks other than 0 get []. Collective.

        The bands of a picture are in order, and so are the pictures.
        """
        grids = [Grid((p.shape[1], p.shape[2]), self.tiling) for p in pictures]

        def kind(i: int) -> tuple[object, ...]:
            return pictures[i].shape[0], pictures[i].dtype.str, grids[i].tile_size

        for _, group in itertools.groupby(range(len(pictures)), kind):
            numbers = list(group)
            tiles = Tiles([pictures[i] for i in numbers], [grids[i] for i in numbers])
            images = preprocessed(tiles, preprocess) if preprocess else tiles
            blend = Blend(grids[numbers[0]])
            for indices, scores in run(for_tiles(self.net, grids[numbers[0]].tile_size), images):
                bands = []
                for i, values in zip(indices, scores, strict=True) if indices is not None else ():
                    picture, row, column = tiles.place(int(i))
                    if row == column == 0:
                        blend = Blend(grids[numbers[picture]])
                    band = blend.add(values)
                    if band is not None:
                        bands.append(Band(numbers[picture], *band))
                values = scores = None  # frees memory for the next mini-batch
                yield bands


def tiles_per_batch(batch_size: int, world: World) -> int:
    """Return the tiles per mini-batch over all ranks: `batch_size`, but at most a block per rank.

    More blocks would take more memory and no less time.
    """
    return min(batch_size, LANES * world.size)


def check_preprocess(preprocess: Preprocess, option: str) -> None:
    """Raise UserError if a preprocessing changes the size of images."""
    if preprocess.size is not None or preprocess.crop is not None:
        raise UserError(
            f"{option}: expected images in their own size, found the preprocessing "
            f"{preprocess}: train on random crops of the images (--random-crop) instead"
        )


def scores_of_store(
    net: Network,
    store: Datastore,
    run: Run,
    *,
    tile: int,
    overlap: int | None,
    finish: Callable[[np.ndarray], np.ndarray] | None,
    world: World,
    everywhere: bool,
) -> np.ndarray | None:
    """Return the scores (K, H, W) of all images of a datastore as one array. Collective.

    `finish` converts scores (K, m, W) of rows to entries (..., m, W), such as classes. Ranks other
    than 0 get None unless the result is needed everywhere.
    """
    tiled, pictures = TiledNetwork(net, tile, overlap), pictures_of(store)
    for picture in pictures[:1]:
        tiled.check(picture)
    result = None
    finish = finish or np.asarray
    row = finish(np.zeros((net.output_shape[0], 1, store.image_shape[2]), np.float32))
    if everywhere or world.rank == 0:
        shape = (*row.shape[:-2], *store.image_shape[1:])
        result = np.empty((len(pictures), *shape), row.dtype)
    for bands in tiled.bands(pictures, run):
        for band in world.broadcast(bands) if everywhere else bands:
            rows = finish(band.scores)
            if result is not None:
                result[band.picture, ..., band.first : band.first + rows.shape[-2], :] = rows
    return result
