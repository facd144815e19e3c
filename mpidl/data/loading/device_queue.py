"""The training set as a recorded step on a GPU reads it: by sample number, from device memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.images import images, targets
from mpidl.backends.gpu.program import ROWS
from mpidl.blocks import LANES, Blocked, share
from mpidl.data.datastore import Datastore
from mpidl.data.loading.feed import Feed, FeedBuilder, label_bounds
from mpidl.data.queue import MinibatchQueue

MOVES = ("mirrored", "top", "left")  # per image, in the order of a step's images
RESIDENT = 0.5  # share of the device's memory that resident data sets of its ranks may take
UPLOADED = 64 << 20  # bytes of a data set that are read and uploaded at a time


class DeviceQueue(MinibatchQueue):
    """A MinibatchQueue that delivers (Feed, None).

    A Feed holds the sample numbers. It also holds pixels and labels or targets, if the data set is
    too large for the device or the host changes what it reads.

    A smaller last mini-batch keeps the shares of a full one: a recorded step finds fewer images in
    the same places. For the parameters see `MinibatchQueue`.

    Attributes
    ----------
    resident : bool
        Whether the data set lies in device memory.
    full_batch : Batch
        A full mini-batch with this rank's share.
    image_bytes : int
        Bytes of an image with its label or target.
    """

    def __init__(
        self,
        datastore: Datastore,
        batch_size: int,
        seed: int,
        world: Any,
        shuffle: str,
        **options: Any,
    ):
        super().__init__(datastore, batch_size, seed, world, shuffle, **options)
        p = self.pipeline
        self.image_bytes = int(np.prod(p.read_shape)) * p.dtype.itemsize
        if p.labels_shape is not None:
            self.image_bytes += int(np.prod(p.labels_shape)) * p.labels_dtype.itemsize
        room = RESIDENT * world.device.memory / world.device.sharers
        # Pixels that the host changes differ in each epoch, so they are uploaded each time.
        self.resident = len(datastore) * self.image_bytes <= room and not p.changes_pixels
        self.full_batch = share(
            self.batch_size, world, seed=seed, load=self.load, device=world.counts
        )

    def epoch(self, epoch, start=0):
        """Generate (Feed, None) of each mini-batch of an epoch, from mini-batch `start` on."""
        self.device = None  # keeps the base class from uploading: the step takes the Feed
        return super().epoch(epoch, start)

    def _shares(self, count):
        runs = self.full_batch.tree.runs
        return [tuple(min(edge * LANES, count) for edge in run) for run in runs]

    def _job(self, indices, epoch):
        first, stop = self._shares(len(indices))[self.world.rank]
        batch = share(len(indices), self.world, indices=indices, epoch=epoch, seed=self.seed)
        builder = FeedBuilder(self.pipeline, batch, indices[first:stop], read=not self.resident)
        return builder.job(self.workers)

    def reader(self) -> Reader:
        """Return a Reader of this data set. Call it once, before the step is recorded."""
        return Reader(self)


class Table:
    """One value per image in device memory: of the data set, or of the mini-batches in flight.

    If the data set is not resident, the host writes a mini-batch of up to `size` images to pinned
    memory, and a second stream uploads it.

    Parameters
    ----------
    device : Device
        The GPU.
    shape, dtype
        Shape and type of each image's value.
    count : int or None
        Images in the data set; None if it is not resident.
    size : int
        Most images of a mini-batch on this rank.
    """

    def __init__(
        self, device: Any, shape: tuple[int, ...], dtype: np.dtype, count: int | None, size: int
    ):
        self.device, self.size, self.staged = device, size, None
        rows = ROWS * size if count is None else count
        self.values = launching.persistent((rows, *shape), dtype)
        self.bounds = array.Bounds()
        if count is None:
            nbytes = self.values.nbytes
            self.staged = device.pinned(nbytes).view(dtype).reshape(ROWS, size, *shape)

    def put(self, start: int, values: np.ndarray) -> None:
        """Write values of the data set from image `start` on."""
        offset = start * int(np.prod(values.shape[1:], dtype=np.int64))
        launching.upload(self.values.part(offset, values.shape), np.ascontiguousarray(values))
        bounds, earlier = label_bounds(values), self.bounds.limits
        if bounds is not None:
            low, high = bounds if earlier is None else earlier
            self.bounds.limits = min(low, bounds[0]), max(high, bounds[1])

    def stage(self, row: int, values: np.ndarray) -> None:
        """Upload a mini-batch to place `row`, before anything that is launched from now on."""
        staged = self.staged[row, : len(values)]
        staged[...] = values
        target = self.values.row(row * self.size)  # the first of as many images
        self.device.after(self.device.stage(target.address, staged))


class Reader:
    """Gives a recorded step its images and labels, and the host's values of each mini-batch.

    Device memory holds the whole data set in the datastore's order, or the mini-batches in flight.
    """

    def __init__(self, queue: DeviceQueue):
        self.full_batch, self.device = queue.full_batch, queue.world.device
        self.pipeline, self.resident = queue.pipeline, queue.resident
        p, (first, stop) = self.pipeline, self.full_batch.images
        self.size = max(stop - first, 1)
        count = len(queue.datastore) if self.resident else None
        self.pixels = Table(self.device, p.read_shape, p.dtype, count, self.size)
        self.labels: Table | None = None
        if p.labels_shape is not None:
            self.labels = Table(self.device, p.labels_shape, p.labels_dtype, count, self.size)
        if self.resident:
            self._upload(count, max(1, UPLOADED // max(1, queue.image_bytes)))

    def _upload(self, count, step):
        """Upload the whole data set, `step` images at a time."""
        for start in range(0, count, step):
            indices = np.arange(start, min(start + step, count))
            pixels, labels = self.pipeline.read(indices, 0, 0)
            self.pixels.put(start, pixels)
            if self.labels is not None:
                self.labels.put(start, labels)
            self.device.synchronize()  # before the host arrays are freed

    def read(self) -> tuple[Blocked, Blocked | None]:
        """Return (images, labels or None) of the step being recorded."""
        batch, normalization = self.full_batch, self.pipeline.normalization
        zeros = np.zeros(batch.blocks * LANES, np.int32)
        samples = launching.scalar("samples", zeros, np.int32)
        launching.scalar("epoch", 0, np.int32)  # with the samples, for `Batch.samples`
        places = samples if self.resident else launching.scalar("places", zeros, np.int32)
        layout = {"indices": places, "counts": batch.counts(), "blocks": batch.blocks}
        options = self.pipeline.moves(zeros, 0, 0)
        options |= {
            name: launching.scalar(name, zeros, np.int32) for name in MOVES if name in options
        }
        constants = {"fill": options.pop("fill", None), **normalization.arrays()}
        options |= {name: launching.constant(v) for name, v in constants.items() if v is not None}
        lanes, labels = images(self.pixels.values, **options, **layout), None
        if self.labels is not None:
            label_lanes = targets(self.labels.values, **layout)
            label_lanes.bounds = self.labels.bounds
            labels = Blocked(label_lanes, batch)
        return Blocked(lanes, batch), labels

    def values(self, feed: Feed, row: int) -> dict[str, Any]:
        """Return the values that `Program.run` takes for a Feed; upload its pixels and labels.

        Parameters
        ----------
        feed : Feed
            The mini-batch.
        row : int
            The one of the ROWS places for mini-batches that no unfinished step reads.

        Raises
        ------
        ValueError
            If the recorded step's ops reject the labels.
        """
        count = len(feed.indices)
        numbers = {"samples": feed.indices}
        numbers |= {name: feed.moves[name] for name in MOVES if name in feed.moves}
        if not self.resident:
            numbers["places"] = row * self.size + np.arange(count)
            if feed.bounds is not None:
                self.labels.bounds.say(*feed.bounds)
            if count:
                self.pixels.stage(row, feed.pixels)
                if self.labels is not None:
                    self.labels.stage(row, feed.labels)
        values: dict[str, Any] = {
            "valid": count,
            "per_image": 1.0 / feed.batch.count,
            "epoch": feed.batch.epoch,
        }
        for name, entries in numbers.items():
            values[name] = np.zeros(self.full_batch.blocks * LANES, np.int32)
            values[name][:count] = entries
        return values
