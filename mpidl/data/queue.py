"""Mini-batches: the global order of an epoch, cut into mini-batches, cut into shares."""

import contextlib
import difflib
import queue
import threading
from typing import Any

import numpy as np

from mpidl import backends, keyed
from mpidl.blocks import Blocked, OneRank, from_images, share
from mpidl.data.datastore import read_images, read_targets
from mpidl.errors import UserError

SHUFFLES = ("every-epoch", "once", "never")


class MinibatchQueue:
    """Delivers this rank's share of each mini-batch of an epoch.

    The order is global: the whole set is permuted (by seed and epoch, whatever the ranks), cut
    into mini-batches of `batch_size`, of which the last may be smaller, and each is cut into
    shares of whole blocks. Every image of an epoch is used exactly once.

    world: whose ranks share a mini-batch; this rank alone where None.
    shuffle: "every-epoch", "once" (epoch 0's order for all) or "never" (the datastore's order).
    prefetch: how many mini-batches a thread reads ahead of their use; 0 reads without a thread.
    The thread makes no MPI calls. plain: see `fold.Tree`; the world's own where None.
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
    ):
        if batch_size < 1:
            raise UserError(f"--batch-size must be at least 1, got {batch_size}")
        if shuffle not in SHUFFLES:
            close = difflib.get_close_matches(str(shuffle), SHUFFLES, 1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"shuffle must be {', '.join(SHUFFLES)}, got {shuffle}{meant}")
        if prefetch < 0:
            raise UserError(f"prefetch must be at least 0, got {prefetch}")
        self.datastore, self.batch_size, self.seed = datastore, int(batch_size), seed
        self.world: Any = OneRank() if world is None else world
        self.shuffle, self.prefetch = shuffle, int(prefetch)
        self.plain = getattr(self.world, "plain", False) if plain is None else plain
        self.device = getattr(self.world, "device", None)  # a GPU that the images go to

    def __len__(self):
        """Mini-batches in an epoch."""
        return -(-len(self.datastore) // self.batch_size)

    def order(self, epoch):
        """The sample indices of an epoch in the order of their use, (n,) int64: a permutation."""
        n = len(self.datastore)
        if self.shuffle == "never":
            return np.arange(n)
        of = epoch if self.shuffle == "every-epoch" else 0
        return keyed.permutation(n, self.seed, "shuffle", epoch=of)

    def epoch(self, epoch, start=0):
        """Generate (images, labels) of each mini-batch of the epoch, from mini-batch `start` on.

        images: Blocked float32 (C, H, W) an image, uint8 pixels divided by 255, floats unchanged.
        labels: Blocked int32, one an image, or the targets, Blocked float32 or int32 of the
        datastore's targets_shape; None where it has neither. Unused lanes are zero. What goes wrong
        in reading is raised at the mini-batch it belongs to.
        """
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be a mini-batch from 0 to {len(self)}, got {start}")
        batches = self._batches(epoch, start)
        batches = ahead(batches, self.prefetch) if self.prefetch else batches
        return batches if self.device is None else uploaded(batches)

    def _batches(self, epoch, start):
        order = self.order(epoch)
        for first in range(start * self.batch_size, len(order), self.batch_size):
            indices = order[first : first + self.batch_size]
            yield self._read(indices, epoch)

    def _read(self, indices, epoch):
        batch = share(
            len(indices),
            self.world,
            indices=indices,
            epoch=epoch,
            seed=self.seed,
            plain=self.plain,
            device=None if self.device is None else self.world.counts,
        )
        images = read_images(self.datastore, batch.indices)
        if self.datastore.targets_shape is not None:
            labels = read_targets(self.datastore, batch.indices)
        elif self.datastore.labels is not None:
            labels = self.datastore.labels[batch.indices].astype(np.int32)
        else:
            labels = None
        if self.device is not None:
            return batch, images, labels
        return lanes_of(images, batch), None if labels is None else from_images(labels, batch)


def lanes_of(images, batch):
    """This share's images (n, C, H, W) as a Blocked float32 value; uint8 pixels become 0 to 1."""
    if images.dtype != np.uint8:
        return from_images(images, batch, np.float32)
    first, last = batch.images
    if len(images) != last - first:
        raise ValueError(f"expected this share's {last - first} images, got {len(images)}")
    return Blocked(backends.of_type(np.float32).images(images), batch)


def uploaded(batches):
    """(images, labels) on the GPU of (batch, pixels, labels) as they were read, by this thread."""
    from mpidl.backends.gpu import array, functions

    with contextlib.closing(batches):
        for batch, pixels, labels in batches:
            show = functions.images if pixels.dtype == np.uint8 else functions.floats
            pixels = array.plain(pixels)
            lanes = show(pixels, counts=batch.counts(), blocks=batch.blocks)
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


def ahead(items, count):
    """The same items, up to `count` of them made by a thread before they are asked for.

    An exception in making an item is raised where the item would have come. The thread ends with
    the items, or with the generator (break out of the loop, or close()).
    """
    made = queue.SimpleQueue()
    free = threading.Semaphore(count)
    stop = threading.Event()

    def make():
        try:
            while True:
                free.acquire()
                if stop.is_set():
                    return
                made.put((next(items), None))
        except StopIteration:
            made.put((None, None))
        except BaseException as e:
            made.put((None, e))

    thread = threading.Thread(target=make, name="mpidl-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = made.get()
            if error is not None:
                raise error
            if item is None:
                return
            free.release()
            yield item
    finally:
        stop.set()
        free.release()
        thread.join()
