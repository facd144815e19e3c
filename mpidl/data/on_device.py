"""The training set as a recorded step on a GPU reads it: by sample number, from device memory."""

import functools
from typing import Any, NamedTuple

import numpy as np

from mpidl.backends.gpu import array, run
from mpidl.backends.gpu.images import floats, images, labels
from mpidl.backends.gpu.program import ROWS
from mpidl.blocks import Blocked, share
from mpidl.data.datastore import read_images
from mpidl.data.queue import MinibatchQueue
from mpidl.data.workers import Job
from mpidl.errors import UserError

MOVES = ("mirrored", "top", "left")  # of each image, in a step's own order
RESIDENT = 0.5  # of the device's memory, which its ranks' data sets may take to be kept there whole


class Feed(NamedTuple):
    """This rank's part of one mini-batch, for a step that was recorded for whole ones.

    batch: the mini-batch's own Batch; indices: the samples of this rank's share, as a whole
    mini-batch is shared; pixels: theirs, where they do not lie on the device; moves: what is done
    to each image by whole pixels, (n,) int32 arrays by name, see `backends.images`.
    """

    batch: Any
    indices: np.ndarray
    pixels: Any
    moves: dict


class DeviceQueue(MinibatchQueue):
    """A MinibatchQueue that delivers (Feed, None): which samples, and their pixels where the data
    set is too large for the device.

    The shares are those of whole mini-batches, in a smaller last one too: a recorded step finds
    there fewer images in the same places.
    """

    def __init__(self, datastore, batch_size, seed, world, shuffle, **how):
        super().__init__(datastore, batch_size, seed, world, shuffle, **how)
        nbytes = len(datastore) * int(np.prod(datastore.image_shape)) * datastore.dtype.itemsize
        room = RESIDENT * world.device.memory / world.device.sharers
        # what the host changes is uploaded anew each time
        self.resident = nbytes <= room and not self.pipeline.late
        self.whole = share(self.batch_size, world, seed=seed, load=self.load, device=world.counts)
        p = self.pipeline
        if p.function is not None:
            raise UserError(
                "a mini-batch function cannot be part of a step that is recorded for a GPU: use "
                "--device cpu, or a loop of your own"
            )
        self.shape = p.image_shape if p.late else datastore.image_shape  # as the device gets them
        self.labels = np.ascontiguousarray(datastore.labels, np.int32)

    def epoch(self, epoch, start=0):
        self.device = None  # nothing is uploaded on the way: `Feed` goes to the step as it is
        return super().epoch(epoch, start)

    def _shares(self, count):
        return [tuple(min(edge * 16, count) for edge in run) for run in self.whole.tree.runs]

    def _job(self, indices, epoch):
        first, last = self._shares(len(indices))[self.world.rank]
        mine = indices[first:last]
        batch = share(len(indices), self.world, indices=indices, epoch=epoch, seed=self.seed)
        p, made = self.pipeline, {}
        pixels = None if self.resident else np.empty((len(mine), *self.shape), p.dtype)

        def plan():
            moves = p.moves(mine, epoch, self.seed)
            made.update({k: v for k, v in moves.items() if k in MOVES})

        def read(part):
            pixels[part] = p.read(mine[part], epoch, self.seed)[0]

        tasks = [plan]
        if not self.resident and len(mine):
            span = 16 * p.span(-(-len(mine) // 16), self.workers)
            parts = (slice(start, start + span) for start in range(0, len(mine), span))
            tasks += [functools.partial(read, part) for part in parts]
        return Job(tasks, lambda: (Feed(batch, mine, pixels, made), None))

    def reader(self):
        """The Reader of this data set: made once, before the step is recorded."""
        return Reader(self)


class Reader:
    """Where a recorded step finds images and labels, and what the host says of each step.

    The data set lies on the device, in uint8 or float32 as the datastore has it, or, where it is
    too large, the mini-batches under way do: the host writes them to pinned memory and a second
    stream uploads them.
    """

    def __init__(self, queue):
        self.whole, self.device = queue.whole, queue.world.device
        store, (first, last) = queue.datastore, queue.whole.images
        self.pipeline, shape = queue.pipeline, queue.shape
        self.size = last - first
        self.resident = queue.resident
        self.bounds = (int(queue.labels.min()), int(queue.labels.max()))
        self.labels = array.plain(queue.labels)
        count = len(store) if self.resident else ROWS * max(self.size, 1)
        self.pixels = run.persistent((count, *shape), store.dtype)
        if self.resident:
            self._upload(store)
        else:
            shape = (ROWS, max(self.size, 1), *shape)
            nbytes = int(np.prod(shape)) * store.dtype.itemsize
            self.staged = self.device.pinned(nbytes).view(store.dtype).reshape(shape)

    def _upload(self, store):
        step = max(1, (64 << 20) // max(1, self.pixels.nbytes // len(store)))
        for start in range(0, len(store), step):
            indices = np.arange(start, min(start + step, len(store)))
            part = np.ascontiguousarray(read_images(store, indices))
            target = self.pixels.part(start * int(np.prod(store.image_shape)), part.shape)
            run.upload(target, part)
            self.device.synchronize()  # before `part` goes

    def read(self):
        """(images, labels) of the step being recorded, Blocked."""
        whole = self.whole
        blocks = whole.blocks
        none = np.zeros(blocks * 16, np.int32)
        samples = run.scalar("samples", none, np.int32)
        places = samples if self.resident else run.scalar("places", none, np.int32)
        run.scalar("epoch", 0, np.int32)  # of the samples, for who asks the batch
        valid = whole.counts()
        show = images if self.pixels.dtype == np.uint8 else floats
        said = self.pipeline.moves(none, 0, 0)
        said |= {name: run.scalar(name, none, np.int32) for name in MOVES if name in said}
        constants = {"fill": said.pop("fill", None), **self.pipeline.numbers()}
        said |= {name: run.constant(v) for name, v in constants.items() if v is not None}
        lanes = show(self.pixels, **said, indices=places, counts=valid, blocks=blocks)
        known = labels(self.labels, samples, valid, blocks)
        known.bounds = self.bounds
        return Blocked(lanes, whole), Blocked(known, whole)

    def values(self, feed, row):
        """What `Program.run` is told of a Feed; uploads its pixels where they are not there.

        row: of the ROWS places for mini-batches the one that no step under way reads.
        """
        count, mine = feed.batch.count, len(feed.indices)
        samples = np.zeros(self.whole.blocks * 16, np.int32)
        samples[:mine] = feed.indices
        values = {"samples": samples, "valid": mine, "per_image": 1.0 / count}
        values["epoch"] = feed.batch.epoch
        for name, numbers in feed.moves.items():
            values[name] = np.zeros(len(samples), np.int32)
            values[name][:mine] = numbers
        if not self.resident:
            values["places"] = np.zeros(len(samples), np.int32)
            values["places"][:mine] = row * max(self.size, 1) + np.arange(mine)
            if mine:
                staged = self.staged[row, :mine]
                staged[...] = feed.pixels
                target = self.pixels.row(row * self.size)  # the first of as many images
                self.device.after(self.device.stage(target.address, staged))
        return values
