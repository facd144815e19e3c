"""The training set as a recorded step on a GPU reads it: by sample number, from device memory."""

import numpy as np

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.images import images, targets
from mpidl.backends.gpu.program import ROWS
from mpidl.blocks import Blocked, share
from mpidl.data.queue import ForDevice, MinibatchQueue, bounds_of

MOVES = ("mirrored", "top", "left")  # of each image, in a step's own order
RESIDENT = 0.5  # of the device's memory, which its ranks' data sets may take to be kept there whole
UPLOADED = 64 << 20  # bytes of a data set that are read and uploaded at a time


class DeviceQueue(MinibatchQueue):
    """A MinibatchQueue that delivers (Feed, None): which samples, and their pixels and labels, or
    targets, where the data set is too large for the device or the host changes what it reads.

    The shares are those of whole mini-batches, in a smaller last one too: a recorded step finds
    there fewer images in the same places.
    """

    def __init__(self, datastore, batch_size, seed, world, shuffle, **how):
        super().__init__(datastore, batch_size, seed, world, shuffle, **how)
        p = self.pipeline
        self.image_bytes = int(np.prod(p.read_shape)) * p.dtype.itemsize
        if p.labels_shape is not None:
            self.image_bytes += int(np.prod(p.labels_shape)) * p.labels_dtype.itemsize
        room = RESIDENT * world.device.memory / world.device.sharers
        # what the host changes is uploaded anew each time
        self.resident = len(datastore) * self.image_bytes <= room and not p.late
        self.whole = share(self.batch_size, world, seed=seed, load=self.load, device=world.counts)

    def epoch(self, epoch, start=0):
        self.device = None  # nothing is uploaded on the way: `Feed` goes to the step as it is
        return super().epoch(epoch, start)

    def _shares(self, count):
        return [tuple(min(edge * 16, count) for edge in run) for run in self.whole.tree.runs]

    def _job(self, indices, epoch):
        first, last = self._shares(len(indices))[self.world.rank]
        batch = share(len(indices), self.world, indices=indices, epoch=epoch, seed=self.seed)
        mine = indices[first:last]
        return ForDevice(self.pipeline, batch, mine, read=not self.resident).job(self.workers)

    def reader(self):
        """The Reader of this data set: made once, before the step is recorded."""
        return Reader(self)


class Table:
    """A value an image on the device: of each of the data set, or of the mini-batches under way.

    count: of the images in the data set, None where it is not kept there: then the host writes a
    mini-batch of up to `size` images to pinned memory, and a second stream uploads it.
    """

    def __init__(self, device, shape, dtype, count, size):
        self.device, self.size, self.staged = device, size, None
        rows = ROWS * size if count is None else count
        self.values = launching.persistent((rows, *shape), dtype)
        self.bounds = array.Bounds()
        if count is None:
            nbytes = self.values.nbytes
            self.staged = device.pinned(nbytes).view(dtype).reshape(ROWS, size, *shape)

    def put(self, start, values):
        """Write the data set's values from image `start` on."""
        at = start * int(np.prod(values.shape[1:], dtype=np.int64))
        launching.upload(self.values.part(at, values.shape), np.ascontiguousarray(values))
        found, known = bounds_of(values), self.bounds.limits
        if found is not None:
            low, high = found if known is None else known
            self.bounds.limits = min(low, found[0]), max(high, found[1])

    def stage(self, row, values):
        """Have a mini-batch's values on the device before what is launched from now on."""
        staged = self.staged[row, : len(values)]
        staged[...] = values
        target = self.values.row(row * self.size)  # the first of as many images
        self.device.after(self.device.stage(target.address, staged))


class Reader:
    """Where a recorded step finds images with their labels or targets, and what the host says of
    each step.

    The data set lies on the device, as the datastore has it, or the mini-batches under way do.
    """

    def __init__(self, queue):
        self.whole, self.device = queue.whole, queue.world.device
        self.pipeline, self.resident = queue.pipeline, queue.resident
        p, (first, last) = self.pipeline, self.whole.images
        self.size = max(last - first, 1)
        count = len(queue.datastore) if self.resident else None
        self.pixels = Table(self.device, p.read_shape, p.dtype, count, self.size)
        self.labels = None
        if p.labels_shape is not None:
            self.labels = Table(self.device, p.labels_shape, p.labels_dtype, count, self.size)
        if self.resident:
            self._upload(count, max(1, UPLOADED // max(1, queue.image_bytes)))

    def _upload(self, count, step):
        for start in range(0, count, step):
            indices = np.arange(start, min(start + step, count))
            pixels, labels = self.pipeline.read(indices, 0, 0)
            self.pixels.put(start, pixels)
            if self.labels is not None:
                self.labels.put(start, labels)
            self.device.synchronize()  # before they go

    def read(self):
        """(images, labels) of the step being recorded, Blocked; no labels are None."""
        whole = self.whole
        blocks = whole.blocks
        none = np.zeros(blocks * 16, np.int32)
        samples = launching.scalar("samples", none, np.int32)
        launching.scalar("epoch", 0, np.int32)  # of the samples, for who asks the batch
        places = samples if self.resident else launching.scalar("places", none, np.int32)
        given = {"indices": places, "counts": whole.counts(), "blocks": blocks}
        said = self.pipeline.moves(none, 0, 0)
        said |= {name: launching.scalar(name, none, np.int32) for name in MOVES if name in said}
        constants = {"fill": said.pop("fill", None), **self.pipeline.numbers()}
        said |= {name: launching.constant(v) for name, v in constants.items() if v is not None}
        lanes, known = images(self.pixels.values, **said, **given), None
        if self.labels is not None:
            found = targets(self.labels.values, **given)
            found.bounds = self.labels.bounds
            known = Blocked(found, whole)
        return Blocked(lanes, whole), known

    def values(self, feed, row):
        """What `Program.run` is told of a Feed; uploads what it has of its images.

        row: of the ROWS places for mini-batches the one that no step under way reads. Raises what
        the recorded step's ops do of labels that cannot be.
        """
        mine = len(feed.indices)
        numbers = {"samples": feed.indices}
        numbers |= {name: feed.moves[name] for name in MOVES if name in feed.moves}
        if not self.resident:
            numbers["places"] = row * self.size + np.arange(mine)
            if feed.bounds is not None:
                self.labels.bounds.say(*feed.bounds)
            if mine:
                self.pixels.stage(row, feed.pixels)
                if self.labels is not None:
                    self.labels.stage(row, feed.labels)
        values = {"valid": mine, "per_image": 1.0 / feed.batch.count, "epoch": feed.batch.epoch}
        for name, known in numbers.items():
            values[name] = np.zeros(self.whole.blocks * 16, np.int32)
            values[name][:mine] = known
        return values
