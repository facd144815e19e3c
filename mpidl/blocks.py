"""The block: 16 consecutive images of the global mini-batch.

It is the layout (an array of per-image values is `(blocks, *image shape, 16)`, the 16 lanes being
16 images), the unit of a rank's work, and the leaf of the tree that adds everything up.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpidl import fold

LANES = 16


def blocks_of(count):
    """How many blocks hold `count` images."""
    return -(-count // LANES)


@dataclass(frozen=True, eq=False)
class Batch:
    """One global mini-batch, and which part of it is this rank's."""

    count: int  # images in the global mini-batch
    tree: fold.Tree  # over its blocks
    world: object  # what folds a Partial: `world.gplus`
    indices: np.ndarray = field(repr=False)  # this share's sample indices in the data set
    epoch: int = 0
    seed: int = 0
    device: Any = None  # what knows the counts on a GPU, where its values lie on one

    @property
    def blocks(self):
        """How many blocks this rank holds."""
        return self.tree.run[1] - self.tree.run[0]

    @property
    def images(self):
        """The images this rank holds, as (first, one past the last) of the global mini-batch."""
        return tuple(min(edge * LANES, self.count) for edge in self.tree.run)

    def valid(self, block):
        """How many images this rank's block number `block` holds: 16 but for the last of all."""
        return min(LANES, self.count - (self.tree.run[0] + block) * LANES)

    def counts(self):
        """`valid` of each of this rank's blocks, as int32; on a GPU that of the share, (1,)."""
        if self.device is not None:
            return self.device.valid(self)
        return np.array([self.valid(b) for b in range(self.blocks)], np.int32)

    def samples(self):
        """(epoch, sample numbers): of each of this rank's images, in unused lanes 0, (blocks * 16,)
        int64; on a GPU both lie there, (1,) and (blocks * 16,) int32."""
        if self.device is not None:
            return self.device.samples(self)
        found = np.zeros(self.blocks * LANES, np.int64)
        found[: len(self.indices)] = self.indices
        return self.epoch, found

    @property
    def per_image(self):
        """1 / count: a number, or Late where a GPU reads it from memory."""
        return 1.0 / self.count if self.device is None else self.device.per_image(self)


class OneRank:
    """The world of a rank by itself, whatever the others do: a sum over it is there at once."""

    rank, size, plain = 0, 1, False

    def gplus(self, value):
        """What `World.gplus` gives on one rank, for a Partial, a plain array or a table of them."""
        if isinstance(value, dict):
            return {name: self.gplus(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.gplus(item) for item in value)
        if not isinstance(value, fold.Partial):
            return value
        for term in value.terms:
            if len(term.tree.runs) != 1:
                raise ValueError(
                    f"the sum is over images that {len(term.tree.runs)} ranks share: add it up in "
                    "the world of its images"
                )
        return value.finish([np.reshape(term.nodes[0], value.shape).copy() for term in value.terms])


def share(count, world, *, indices=None, epoch=0, seed=0, load=None, plain=None, device=None):
    """This rank's Batch of a mini-batch of `count` images, which the ranks of `world` share.

    indices: (count,), the sample numbers of all its images in their order, the same on every rank;
    0, 1, ... where not given. The Batch's own `indices` are those of this rank's images. epoch,
    seed: with the samples, what random numbers (of dropout) are keyed by. load: see
    `fold.split_blocks`; plain: see `fold.Tree`, the world's own where None; device: see `Batch`.
    """
    plain = getattr(world, "plain", False) if plain is None else plain
    leaves = blocks_of(count)
    tree = fold.Tree(leaves, fold.split_blocks(leaves, world.size, load), world.rank, plain)
    first, last = (min(edge * LANES, count) for edge in tree.run)
    indices = np.arange(count) if indices is None else np.asarray(indices)
    return Batch(count, tree, world, indices[first:last], epoch, seed, device)


class Blocked:
    """A value with one entry per image, held by the rank that owns the image's block.

    lanes: (blocks, *image_shape, 16). Where the last block is not full, what lies in its unused
    lanes has no meaning in a value, but is finite, and is zero in a cotangent, so that the sums of
    products of the two need no mask.
    """

    __slots__ = ("_lanes", "batch")

    def __init__(self, lanes, batch):
        if lanes.shape[0] != batch.blocks or lanes.shape[-1] != LANES:
            raise ValueError(
                f"expected ({batch.blocks}, ..., {LANES}) lanes for this share, got {lanes.shape}"
            )
        self._lanes, self.batch = lanes, batch

    @property
    def lanes(self):
        """(blocks, *image_shape, 16)."""
        return self._lanes

    @property
    def source(self):
        """What a backend reads this value from: its lanes, or a DeferredInput."""
        return self.lanes

    @property
    def image_shape(self):
        """The shape of one image's entry."""
        return self.lanes.shape[1:-1]

    @property
    def shape(self):
        """(images in the global mini-batch, *image_shape): the same on every rank."""
        return (self.batch.count, *self.image_shape)

    @property
    def dtype(self):
        return self.lanes.dtype

    def like(self, lanes):
        """Another value of the same images."""
        return Blocked(lanes, self.batch)

    def stored(self):
        """This value with its lanes in memory: itself, unless it is a DeferredActivation."""
        return self

    def block(self, b):
        """Block b as a plain C-ordered (n <= 16, *image_shape) array (always the same layout)."""
        lanes = np.asarray(self.lanes)[b]
        return np.ascontiguousarray(np.moveaxis(lanes, -1, 0)[: self.batch.valid(b)])

    def local(self):
        """This rank's images as a plain (n, *image_shape) array."""
        flat = np.moveaxis(np.asarray(self.lanes), -1, 1).reshape(-1, *self.image_shape)
        first, last = self.batch.images
        return np.ascontiguousarray(flat[: last - first])

    def _refuse(self, *_, **__):
        raise TypeError(
            "each rank holds only its share of this value's images: use dl.mean(value) or "
            "dl.sum(value) for the mean or sum over all of them, value.local() for the share"
        )

    mean = sum = __len__ = __float__ = __bool__ = __array__ = __iter__ = _refuse

    def __repr__(self):
        return f"Blocked(shape={self.shape}, {self.batch.blocks} block(s) here, {self.dtype})"


class DeferredInput(NamedTuple):
    """An activation as a backend reads it: max(0, (x - mean) * scale + beta) by channel."""

    x: np.ndarray  # (blocks, C, ..., 16)
    mean: np.ndarray  # (C,) float32, as the two others
    scale: np.ndarray
    beta: np.ndarray


class DeferredActivation(Blocked):
    """ReLU of batch normalization of `source.x`, which alone is stored: who reads it normalizes.

    Its lanes are computed when they are asked for, and not kept.
    """

    __slots__ = ("deferred", "compute", "shape_of_image")

    def __init__(self, source, batch, compute, image_shape=None):
        self.deferred, self.batch, self.compute = source, batch, compute
        self.shape_of_image = source.x.shape[1:-1] if image_shape is None else image_shape

    @property
    def source(self):
        return self.deferred

    @property
    def lanes(self):
        lanes = self.compute(self.deferred)
        return lanes.reshape(len(lanes), *self.shape_of_image, lanes.shape[-1])

    @property
    def image_shape(self):
        return self.shape_of_image

    @property
    def dtype(self):
        return self.deferred.x.dtype

    def stored(self):
        return self.like(self.lanes)

    def reshape(self, image_shape):
        """The same values with another image shape, still deferred."""
        return DeferredActivation(self.deferred, self.batch, self.compute, image_shape)


def readable(value):
    """What a backend reads a Blocked value from in its image shape: a DeferredInput if that has
    it, else its lanes."""
    if isinstance(value, DeferredActivation) and value.image_shape != value.deferred.x.shape[1:-1]:
        return value.lanes
    return value.source


class GradientWithSums(Blocked):
    """The cotangent of a DeferredActivation with what batch normalization will ask of it.

    sums: Partial (2C,) float64 of [sum of dz, sum of dz * (x - mean)], dz the part of the cotangent
    where the activation is > 0.
    """

    __slots__ = ("sums",)

    def __init__(self, lanes, batch, sums):
        super().__init__(lanes, batch)
        self.sums = sums


def from_images(images, batch, dtype=None):
    """A Blocked value of this share's plain (n, *image_shape) array; unused lanes are zero."""
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


def zero_unused(lanes, batch):
    """Set the unused lanes to zero, in place: what every cotangent owes its readers."""
    if batch.blocks and batch.valid(batch.blocks - 1) < LANES:
        lanes[-1, ..., batch.valid(batch.blocks - 1) :] = 0
    return lanes
