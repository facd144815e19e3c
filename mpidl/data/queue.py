"""Mini-batches: the global order of an epoch, cut into mini-batches, cut into shares."""

import contextlib
import difflib
import functools
from typing import Any

import numpy as np

from mpidl import keyed
from mpidl.backends import memory
from mpidl.blocks import LANES, Blocked, OneRank, from_images, share
from mpidl.data import partition
from mpidl.data.pipeline import Pipeline, fill_blocks
from mpidl.data.workers import Job, ahead, in_turn
from mpidl.errors import UserError

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

    function(images, labels, at): your own, called for 16 images at a time (fewer at the end of a
    mini-batch), by the threads, after the augmenter and before normalization. images: (n, C, H, W),
    uint8 or float32 as the datastore has them; labels: int32 (n,), or the targets, or None; `at`
    has indices (n,), epoch and seed, by which random numbers are to be keyed. It returns images
    (n, C, H, W), uint8 or float, or (images, labels).

    load: how much each rank takes, see `fold.split_blocks`; it may be assigned between epochs.
    sampling: "global", or "partition", where each rank has a part of the set to itself, which
    "every-epoch" orders by itself: what is in a mini-batch, and so the weights, depends on the
    number of ranks then.
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
    ):
        if batch_size < 1:
            raise UserError(f"--batch-size must be at least 1, got {batch_size}")
        for name, value, known in ("shuffle", shuffle, SHUFFLES), ("sampling", sampling, SAMPLINGS):
            if value not in known:
                close = difflib.get_close_matches(str(value), known, 1)
                meant = f"; did you mean {close[0]}?" if close else ""
                raise UserError(f"{name} must be {', '.join(known)}, got {value}{meant}")
        if prefetch < 0:
            raise UserError(f"prefetch must be at least 0, got {prefetch}")
        if workers < 1:
            raise UserError(f"workers must be at least 1, got {workers}")
        self.datastore, self.batch_size, self.seed = datastore, int(batch_size), seed
        self.world: Any = OneRank() if world is None else world
        self.shuffle, self.prefetch, self.workers = shuffle, int(prefetch), int(workers)
        self.pipeline = Pipeline(datastore, augmenter, normalization, crop, function)
        self.plain = getattr(self.world, "plain", False) if plain is None else plain
        self.load, self.sampling = load, sampling
        self.device = getattr(self.world, "device", None)  # a GPU that the images go to

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
        return batches if self.device is None else uploaded(batches)

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
        made = _OnDevice(batch, self) if self.device is not None else _InBlocks(batch, self)
        span = self.pipeline.span(batch.blocks, self.workers)
        tasks = [
            functools.partial(made.read, first, min(first + span, batch.blocks))
            for first in range(0, batch.blocks, span)
        ]
        return Job(tasks, made.result)


class _InBlocks:
    """A mini-batch that is being made on the CPU."""

    def __init__(self, batch, queue):
        self.batch, self.pipeline = batch, queue.pipeline
        p = self.pipeline
        self.lanes = memory.empty((batch.blocks, *p.image_shape, LANES))
        self.labels = None
        if p.labels_shape is not None:
            self.labels = np.zeros((batch.blocks, *p.labels_shape, LANES), p.labels_dtype)

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

    def result(self):
        labels = None if self.labels is None else Blocked(self.labels, self.batch)
        return Blocked(self.lanes, self.batch), labels


class _OnDevice:
    """A mini-batch that is being read for a GPU: (batch, pixels, labels, moves, numbers)."""

    def __init__(self, batch, queue):
        self.batch, self.pipeline, n = batch, queue.pipeline, len(batch.indices)
        p = self.pipeline
        shape = p.image_shape if p.late else p.datastore.image_shape
        self.pixels, self.labels = np.empty((n, *shape), p.dtype), None
        if p.labels_shape is not None:
            self.labels = np.empty((n, *p.labels_shape), p.labels_dtype)

    def read(self, first, last):
        batch, part = self.batch, slice(first * LANES, last * LANES)
        found = self.pipeline.read(batch.indices[part], batch.epoch, batch.seed)
        self.pixels[part] = found[0]
        if self.labels is not None:
            self.labels[part] = found[1]

    def result(self):
        p, batch = self.pipeline, self.batch
        moves = p.moves(batch.indices, batch.epoch, batch.seed)
        return batch, self.pixels, self.labels, moves, p.numbers()


def uploaded(batches):
    """(images, labels) on the GPU of what `_OnDevice` read, by this thread."""
    from mpidl.backends.gpu import array, functions

    with contextlib.closing(batches):
        for batch, pixels, labels, moves, numbers in batches:
            show = functions.images if pixels.dtype == np.uint8 else functions.floats
            pixels = array.plain(pixels)
            said = {
                name: array.plain(value) if isinstance(value, np.ndarray) else value
                for name, value in (moves | numbers).items()
            }
            lanes = show(pixels, **said, counts=batch.counts(), blocks=batch.blocks)
            if labels is not None and labels.dtype == np.float32 and labels.ndim == 4:
                targets = array.plain(labels)  # images, which lie as images do
                show = functions.floats
                labels = Blocked(show(targets, counts=batch.counts(), blocks=batch.blocks), batch)
            elif labels is not None:
                found = from_images(labels, batch).lanes
                labels = Blocked(array.plain(found), batch)
                if found.dtype == np.int32:
                    bounds = (int(found.min()), int(found.max())) if found.size else None
                    labels.lanes.bounds = bounds
            yield Blocked(lanes, batch), labels
