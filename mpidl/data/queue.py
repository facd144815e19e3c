"""Mini-batches: the global order of an epoch, cut into mini-batches, cut into shares."""

import contextlib
import functools
from typing import Any, NamedTuple

import numpy as np

from mpidl import keyed
from mpidl.backends.cpu import arenas
from mpidl.blocks import LANES, Blocked, OneRank, blocks_of, share
from mpidl.data import partition
from mpidl.data.loading.pipeline import Pipeline, fill_blocks
from mpidl.data.loading.workers import Job, ahead, in_turn
from mpidl.errors import UserError
from mpidl.text import did_you_mean

SHUFFLES = ("every-epoch", "once", "never")
SAMPLINGS = ("global", "partition")


class MinibatchQueue:
    """Delivers this rank's share of each mini-batch of an epoch.

    The order is global: the whole set is permuted (by seed and epoch, whatever the ranks), cut
    into mini-batches of `batch_size`, of which the last may be smaller, and each is cut into
    shares of whole blocks. Every image of an epoch is used exactly once.

    world: whose ranks share a mini-batch; this rank alone where None.
    shuffle: "every-epoch", "once" (epoch 0's order for all) or "never" (the datastore's order).
    prefetch: how many mini-batches are made ahead of their use, by `workers` threads; 0 makes them
    when they are asked for, without a thread. Neither changes order or bytes. The threads make no
    MPI calls; with several of them the datastore's `read` is called by several at once. plain: see
    `fold.Tree`; the world's own where None.

    augmenter: an `Augmenter` that changes the images anew in each epoch. normalization: a
    `Normalization`; uint8 pixels are divided by 255 where None. crop: (P, Q) of the window that is
    cut from the centre of images which no augmenter cuts.

    The memory of a mini-batch that nobody holds any more is used for the next one: a loop that ends
    with `del images, labels` needs one mini-batch less.

    function(images, labels, at): your own, called for 16 images at a time (fewer at the end of a
    mini-batch), by the threads, after the augmenter and before normalization. images: (n, C, H, W),
    uint8 or float32 as the datastore has them; labels: int32 (n,), or the targets, or None; `at`
    has indices (n,), epoch and seed, by which random numbers are to be keyed. It returns images
    (n, C, H, W), uint8 or float, or (images, labels).

    load: how much each rank takes, see `fold.split_blocks`; it may be assigned between epochs.
    classes: how many there are, where labels of other numbers are to be a UserError that names the
    image. sampling: "global", or "partition", where each rank has a part of the set to itself,
    which "every-epoch" orders by itself: what is in a mini-batch, and so the weights, depends on
    the number of ranks then.
    """

    def __init__(
        self,
        datastore,
        batch_size=128,
        seed=0,
        world=None,
        shuffle="every-epoch",
        prefetch=2,
        plain=None,
        *,
        workers=1,
        augmenter=None,
        normalization=None,
        crop=None,
        function=None,
        load=None,
        sampling="global",
        classes=None,
    ):
        if batch_size < 1:
            raise UserError(f"--batch-size must be at least 1, got {batch_size}")
        for name, value, known in ("shuffle", shuffle, SHUFFLES), ("sampling", sampling, SAMPLINGS):
            if value not in known:
                hint = did_you_mean(str(value), known)
                raise UserError(f"{name} must be {', '.join(known)}, got {value}{hint}")
        if prefetch < 0:
            raise UserError(f"prefetch must be at least 0, got {prefetch}")
        if workers < 1:
            raise UserError(f"workers must be at least 1, got {workers}")
        self.datastore, self.batch_size, self.seed = datastore, int(batch_size), seed
        self.world: Any = OneRank() if world is None else world
        self.shuffle, self.prefetch, self.workers = shuffle, int(prefetch), int(workers)
        self.pipeline = Pipeline(datastore, augmenter, normalization, crop, function, classes)
        self.plain = getattr(self.world, "plain", False) if plain is None else plain
        self.load, self.sampling = load, sampling
        self.device = getattr(self.world, "device", None)  # a GPU that the images go to
        # Mini-batches are made beside the step, all of one size: among its activations they would
        # leave holes that are too small for the next one.
        self.arena = arenas.Arena()

    def __len__(self):
        """Mini-batches in an epoch."""
        return -(-len(self.datastore) // self.batch_size)

    def order(self, epoch):
        """The sample indices of an epoch in the order of their use, (n,) int64: a permutation."""
        n = len(self.datastore)
        each, parts = self.shuffle == "every-epoch", self.sampling == "partition"
        if self.shuffle == "never":
            order = np.arange(n)
        else:
            of = epoch if each and not parts else 0
            order = keyed.permutation(n, self.seed, "shuffle", epoch=of)
        if not parts:
            return order
        shares = [
            self._shares(min(self.batch_size, n - first)) for first in range(0, n, self.batch_size)
        ]
        return partition.order_of(order, shares, self.seed, epoch if each else None)

    def _shares(self, count):
        """Of each rank, its (first, one past the last) image of a mini-batch of `count`."""
        return partition.shares_of(count, self.world.size, self.load)

    def epoch(self, epoch, start=0):
        """Generate (images, labels) of each mini-batch of the epoch, from mini-batch `start` on.

        images: Blocked float32 (C, H, W) an image, augmented and normalized: without more said,
        uint8 pixels divided by 255, floats unchanged. labels: Blocked int32, one an image, or the
        targets, Blocked float32 or int32 of the datastore's targets_shape; None where it has
        neither. Unused lanes are zero. What goes wrong in reading is raised at the mini-batch it
        belongs to.
        """
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be a mini-batch from 0 to {len(self)}, got {start}")
        jobs = self._jobs(epoch, start)
        batches = ahead(jobs, self.prefetch, self.workers) if self.prefetch else in_turn(jobs)
        return batches if self.device is None else uploaded(batches, self.pipeline)

    def _jobs(self, epoch, start):
        order = self.order(epoch)
        for first in range(start * self.batch_size, len(order), self.batch_size):
            yield self._job(order[first : first + self.batch_size], epoch)

    def _job(self, indices, epoch):
        """The Job of one mini-batch, whose tasks read runs of its blocks."""
        batch = share(
            len(indices),
            self.world,
            indices=indices,
            epoch=epoch,
            seed=self.seed,
            load=self.load,
            plain=self.plain,
            device=None if self.device is None else self.world.counts,
        )
        if self.device is not None:
            return ForDevice(self.pipeline, batch, batch.indices).job(self.workers)
        made = _InBlocks(batch, self.pipeline, self.arena)
        return Job(runs(made.read, self.pipeline, batch.blocks, self.workers), made.result)


def runs(read, pipeline, blocks, workers):
    """The tasks that read so many blocks: read(first, one past the last) of a run of them each."""
    span = pipeline.span(blocks, workers)
    return [
        functools.partial(read, first, min(first + span, blocks))
        for first in range(0, blocks, span)
    ]


class _InBlocks:
    """A mini-batch that is being made on the CPU, in an arena."""

    def __init__(self, batch, pipeline, arena):
        self.batch, self.pipeline = batch, pipeline
        p, blocks = pipeline, batch.blocks
        self.lanes = arenas.empty((blocks, *p.image_shape, LANES), arena=arena)
        self.labels = None
        if p.labels_shape is not None:
            self.labels = arenas.empty((blocks, *p.labels_shape, LANES), p.labels_dtype, arena)

    def read(self, first, last):
        """Make these blocks of this rank's share."""
        p, batch = self.pipeline, self.batch
        indices = batch.indices[first * LANES : last * LANES]
        pixels, labels = p.read(indices, batch.epoch, batch.seed)
        moves = p.moves(indices, batch.epoch, batch.seed)
        fill_blocks(pixels, moves, p.numbers(), self.lanes[first:last])
        if labels is not None:
            for b in range(first, last):
                n = batch.valid(b)
                part = labels[(b - first) * LANES :][:n]
                self.labels[b, ..., :n] = np.moveaxis(part, 0, -1)
                self.labels[b, ..., n:] = 0

    def result(self):
        labels = None if self.labels is None else Blocked(self.labels, self.batch)
        return Blocked(self.lanes, self.batch), labels


class Feed(NamedTuple):
    """This rank's part of a mini-batch, as a GPU is given it.

    indices: its samples. pixels, labels: plain arrays, (n, C, H, W) and (n, *labels_shape), as
    `Pipeline.read` makes them; None where they lie on the device, or are not known. bounds: the
    least and the largest of labels that are whole numbers, or None. moves: see `Pipeline.moves`.
    """

    batch: Any
    indices: np.ndarray
    pixels: Any
    labels: Any
    bounds: Any
    moves: dict


class ForDevice:
    """A Feed that is being made. read: whether pixels and labels are, or lie on the device."""

    def __init__(self, pipeline, batch, indices, read=True):
        self.pipeline, self.batch, self.indices = pipeline, batch, indices
        self.pixels = self.labels = None
        self.bounds, self.moves = [], {}  # the bounds of each run
        self.blocks = blocks_of(len(indices)) if read else 0
        if read:
            p, n = pipeline, len(indices)
            self.pixels = np.empty((n, *p.read_shape), p.dtype)
            if p.labels_shape is not None:
                self.labels = np.empty((n, *p.labels_shape), p.labels_dtype)

    def job(self, workers):
        """The Job whose item is (Feed, None)."""
        tasks = runs(self.read, self.pipeline, self.blocks, workers)
        return Job([self.plan, *tasks], self.result)

    def plan(self):
        at = self.batch
        self.moves = self.pipeline.moves(self.indices, at.epoch, at.seed)

    def read(self, first, last):
        at, part = self.batch, slice(first * LANES, last * LANES)
        pixels, labels = self.pipeline.read(self.indices[part], at.epoch, at.seed)
        self.pixels[part] = pixels
        if self.labels is not None:
            self.labels[part] = labels
            self.bounds.append(bounds_of(labels))

    def result(self):
        known = [pair for pair in self.bounds if pair is not None]
        bounds = (min(a for a, _ in known), max(b for _, b in known)) if known else None
        return Feed(self.batch, self.indices, self.pixels, self.labels, bounds, self.moves), None


def bounds_of(labels):
    """(least, largest) of labels that are whole numbers, None of others and of none."""
    if labels is None or labels.dtype.kind == "f" or not labels.size:
        return None
    return int(labels.min()), int(labels.max())


def uploaded(feeds, pipeline):
    """(images, labels) on the GPU of each (Feed, None), by this thread."""
    from mpidl.backends.gpu import array
    from mpidl.backends.gpu import images as gpu_images

    with contextlib.closing(feeds):
        for feed, _ in feeds:
            batch = feed.batch
            given = {"counts": batch.counts(), "blocks": batch.blocks}
            said = {
                name: array.plain(value) if isinstance(value, np.ndarray) else value
                for name, value in (feed.moves | pipeline.numbers()).items()
            }
            images, labels = gpu_images.images(array.plain(feed.pixels), **said, **given), None
            if feed.labels is not None:
                lanes = gpu_images.targets(array.plain(feed.labels), **given)
                lanes.bounds = array.Bounds(feed.bounds)
                labels = Blocked(lanes, batch)
            yield Blocked(images, batch), labels
