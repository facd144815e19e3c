"""Divide a mini-batch into blocks of 16 images, and the blocks among the ranks.

A value with one entry per image is an array (blocks, *image_shape, 16), in which each of the 16
lanes of a block is an image. The blocks of a rank are its share. They are also the leaves of the
tree by which values are summed over the mini-batch (see `fold`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar, overload

import numpy as np

from mpidl.core import fold
from mpidl.core.values import BF16, Operators, as_type

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

LANES = 16
Key = TypeVar("Key")
Replicated = TypeVar("Replicated")


class Ranks(Protocol):
    """The ranks that share a mini-batch, such as `mpidl.World` and `OneRank`."""

    @property
    def rank(self) -> int:
        """Index of this rank, from 0 to size - 1."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def gplus(self, value: Any) -> Any:
        """Add up a Partial over the ranks, or each Partial in a dict, list or tuple."""


def blocks_of(count: int) -> int:
    """Return the number of blocks that hold `count` images."""
    return -(-count // LANES)


class Source(NamedTuple):
    """What a queue did to images: the name of its function, and its Normalization.

    `normalization` is None if 8-bit pixels are divided by 255.
    """

    function: str | None
    normalization: object | None
    image_shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """A global mini-batch, and the part that this rank holds (its share).

    Parameters
    ----------
    count
        Number of images in the global mini-batch.
    tree
        The tree whose leaves are the blocks of the mini-batch.
    world
        The ranks that share the mini-batch.
    indices
        Sample numbers of this rank's images in the data set.
    epoch, seed
        Part of the key of random numbers, such as dropout masks.
    device
        The object that provides counts and sample numbers to a recorded step, or None.
    total
        Number of images of the whole mini-batch if this is a part of it; by default `count`.
    source
        What a queue did to the images, or None.
    """

    count: int
    tree: fold.Tree
    world: Ranks
    indices: np.ndarray
    epoch: int = 0
    seed: int = 0
    device: Any = None
    total: int | None = None
    source: Source | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks that this rank holds."""
        return self.tree.run[1] - self.tree.run[0]

    @property
    def images(self) -> tuple[int, int]:
        """This rank's images in the global mini-batch as (first, one past the last)."""
        first, stop = (min(edge * LANES, self.count) for edge in self.tree.run)
        return first, stop

    def valid(self, block: int) -> int:
        """Return the number of images in a block: 16, or fewer in the last one of the mini-batch.

        Parameters
        ----------
        block
            Index of the block on this rank, from 0.

        Returns
        -------
        int, from 1 to 16
        """
        return min(LANES, self.count - (self.tree.run[0] + block) * LANES)

    def counts(self) -> np.ndarray:
        """Return the number of images in each block of this rank.

        Returns
        -------
        ndarray (blocks,) int32; on a GPU, the number of images on this rank, (1,)
        """
        if self.device is not None:
            counts: np.ndarray = self.device.valid(self)
            return counts
        return np.array([self.valid(b) for b in range(self.blocks)], np.int32)

    def samples(self) -> tuple[int | np.ndarray, np.ndarray]:
        """Return the epoch and the sample numbers of this rank's images.

        Returns
        -------
        epoch, samples
            `samples` has a number per lane, (blocks * 16,) int64, 0 in unused lanes. On a GPU, both
            are arrays of int32.
        """
        if self.device is not None:
            epoch, samples = self.device.samples(self)
            return epoch, samples
        samples = np.zeros(self.blocks * LANES, np.int64)
        samples[: len(self.indices)] = self.indices
        return self.epoch, samples

    @property
    def per_image(self) -> float | fold.Late:
        """1 / total as a float, or as a `fold.Late` if the counts are in GPU memory."""
        total = self.total or self.count
        return 1.0 / total if self.device is None else self.device.per_image(self)

    def __repr__(self) -> str:
        start, stop = self.tree.run
        return (
            f"Batch({self.count} images, blocks [{start}, {stop}) of {self.tree.leaves} on rank "
            f"{self.tree.rank} of {len(self.tree.runs)}, epoch={self.epoch}, seed={self.seed})"
        )


class OneRank:
    """A world with a single rank, whose sums need no communication."""

    rank, size, plain = 0, 1, False

    @overload
    def gplus(self, value: fold.Partial) -> np.ndarray: ...
    @overload
    def gplus(self, value: dict[Key, fold.Partial]) -> dict[Key, np.ndarray]: ...
    @overload
    def gplus(self, value: list[fold.Partial]) -> list[np.ndarray]: ...
    @overload
    def gplus(self, value: tuple[fold.Partial, ...]) -> tuple[np.ndarray, ...]: ...
    @overload
    def gplus(self, value: Replicated) -> Replicated: ...
    def gplus(self, value: Any) -> Any:
        """Return the totals of Partials, as `World.gplus` does on one rank.

        Parameters
        ----------
        value
            A Partial, or a dict, list or tuple of Partials; arrays stay as they are.

        Returns
        -------
        The totals, in the structure of `value`

        Raises
        ------
        ValueError
            If several ranks share the images of a Partial.
        """
        if isinstance(value, dict):
            return {name: self.gplus(element) for name, element in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.gplus(element) for element in value)
        if not isinstance(value, fold.Partial):
            return value
        for term in value.terms:
            if len(term.tree.runs) != 1:
                raise ValueError(
                    f"the sum was computed from images divided among {len(term.tree.runs)} ranks; "
                    "sum it in the world that divided the images"
                )
        return value.finish([np.reshape(term.nodes[0], value.shape).copy() for term in value.terms])


@functools.lru_cache(maxsize=64)
def _tree(
    leaves: int, ranks: int, load: tuple[int, ...] | None, rank: int, plain: bool
) -> fold.Tree:
    return fold.Tree(leaves, fold.split_blocks(leaves, ranks, load), rank, plain)


def share(
    count: int,
    world: Ranks,
    *,
    indices: ArrayLike | None = None,
    epoch: int = 0,
    seed: int = 0,
    load: tuple[int, ...] | None = None,
    plain: bool | None = None,
    device: Any = None,
    source: Source | None = None,
) -> Batch:
    """Divide a mini-batch among the ranks, and return this rank's Batch.

    Parameters
    ----------
    count, world, epoch, seed, device, source
        As in `Batch`.
    indices
        Sample numbers of all images of the mini-batch, (count,), equal on all ranks; by default 0
        to count - 1.
    load
        One weight per rank; see `fold.split_blocks`.
    plain
        Whether each rank adds its blocks from left to right (see `fold.Tree`); by default, as the
        world does.

    Returns
    -------
    Batch
        The mini-batch with this rank's share, which may be empty.
    """
    plain = getattr(world, "plain", False) if plain is None else plain
    leaves = blocks_of(count)
    tree = _tree(leaves, world.size, None if load is None else tuple(load), world.rank, plain)
    first, last = (min(edge * LANES, count) for edge in tree.run)
    indices = np.arange(count) if indices is None else np.asarray(indices)
    return Batch(count, tree, world, indices[first:last], epoch, seed, device, source=source)


class DeferredInput(NamedTuple):
    """The stored input of an activation that backends compute when they read it.

    The activation is min(max((x - mean) * scale + beta, low), high), by default a ReLU.
    """

    x: np.ndarray  # (blocks, C, ..., 16)
    mean: np.ndarray  # (C,), as are scale and beta
    scale: np.ndarray
    beta: np.ndarray
    low: float = 0.0
    high: float = math.inf


class Blocked(Operators["Factor"]):
    """A value with one entry per image. Each rank holds the entries of its own images.

    Unused lanes of the last block hold arbitrary finite numbers in a value, and zeros in a
    cotangent, so a sum of products of the two needs no mask.

    Parameters
    ----------
    lanes
        The entries of this rank's images, a NumPy or GPU array (blocks, *image_shape, 16).
    batch
        The mini-batch that the images belong to.
    """

    __slots__ = ("_lanes", "batch")
    batch: Batch

    def __init__(self, lanes: np.ndarray, batch: Batch) -> None:
        if lanes.shape[0] != batch.blocks or lanes.shape[-1] != LANES:
            raise ValueError(
                f"expected ({batch.blocks}, ..., {LANES}) lanes for this share, got {lanes.shape}"
            )
        self._lanes, self.batch = lanes, batch

    @property
    def raw(self) -> np.ndarray:
        """The array (blocks, *image_shape, 16) in the dtype of `storage`."""
        return self._lanes

    @property
    def lanes(self) -> np.ndarray:
        """The array (blocks, *image_shape, 16). Each access widens bfloat16 numbers to float32."""
        return as_type(self.raw, self.dtype)

    @property
    def stored_array(self) -> np.ndarray:
        """An array of this value that is in memory, for example to find the backend."""
        return self.raw

    @property
    def storage(self) -> np.dtype:
        """Type of the entries in memory, perhaps `values.BF16`."""
        return self.stored_array.dtype

    @property
    def source(self) -> np.ndarray | DeferredInput:
        """The operand that a backend reads: the raw array, or a DeferredInput."""
        return self.raw

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of the entry of one image."""
        return self.raw.shape[1:-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """(images in the global mini-batch, *image_shape), equal on all ranks."""
        return (self.batch.count, *self.image_shape)

    @property
    def dtype(self) -> np.dtype:
        """Type of the entries, as `lanes` returns them."""
        return np.dtype(np.float32) if self.storage == BF16 else self.storage

    def like(self, lanes: np.ndarray) -> Blocked:
        """Return a Blocked value for the same images with other lanes.

        Parameters
        ----------
        lanes
            Array (blocks, ..., 16), which is not copied.

        Returns
        -------
        Blocked
        """
        return Blocked(lanes, self.batch)

    def stored(self) -> Blocked:
        """Return this value, or a new one if lanes must be computed (see `backends.deferred`).

        Returns
        -------
        Blocked
        """
        return self

    def block(self, b: int) -> np.ndarray:
        """Return the entries of a block's images, C-ordered, because NumPy's sums depend on order.

        Parameters
        ----------
        b
            Index of the block on this rank, from 0.

        Returns
        -------
        ndarray (n, *image_shape), where n <= 16 is the number of images in the block
        """
        lanes = np.asarray(self.lanes)[b]
        return np.ascontiguousarray(np.moveaxis(lanes, -1, 0)[: self.batch.valid(b)])

    def local(self) -> np.ndarray:
        """Return the entries of this rank's images.

        Returns
        -------
        ndarray (n, *image_shape), where n may be 0
        """
        flat = np.moveaxis(np.asarray(self.lanes), -1, 1).reshape(-1, *self.image_shape)
        first, last = self.batch.images
        return np.ascontiguousarray(flat[: last - first])

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "each rank holds only its share of this value's images: use dl.mean(value) or "
            "dl.sum(value) for the mean or sum over all images, value.local() for the share"
        )

    mean = sum = __len__ = __float__ = __bool__ = __array__ = __iter__ = _refuse

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, {self.batch.blocks} "
            "block(s) on this rank)"
        )


Factor: TypeAlias = Blocked | np.ndarray | float


def from_images(images: ArrayLike, batch: Batch, dtype: DTypeLike | None = None) -> Blocked:
    """Convert the images of this rank's share to a Blocked value, with zeros in unused lanes.

    Parameters
    ----------
    images
        The images of this rank, (n, *image_shape), which are copied.
    batch
        The mini-batch that the images belong to.
    dtype
        Dtype of the value; by default the dtype of `images`.

    Returns
    -------
    Blocked

    Raises
    ------
    ValueError
        If n is not the number of images in the share.
    """
    images = np.asarray(images)
    dtype = images.dtype if dtype is None else dtype
    lanes = np.zeros((batch.blocks, *images.shape[1:], LANES), dtype)
    first, last = batch.images
    if len(images) != last - first:
        raise ValueError(f"expected this share's {last - first} images, got {len(images)}")
    for b in range(batch.blocks):
        n = batch.valid(b)
        lanes[b, ..., :n] = np.moveaxis(images[b * LANES : b * LANES + n], 0, -1)
    return Blocked(lanes, batch)


def zero_unused(lanes: np.ndarray, batch: Batch) -> np.ndarray:
    """Set unused lanes to zero in place, as cotangents require, and return the array."""
    if batch.blocks and batch.valid(batch.blocks - 1) < LANES:
        lanes[-1, ..., batch.valid(batch.blocks - 1) :] = 0
    return lanes
