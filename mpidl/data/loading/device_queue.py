"""Deliver mini-batches to a recorded training step, which reads images from GPU memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu.images import images, targets
from mpidl.backends.gpu.program import ROWS
from mpidl.core.blocks import LANES, Blocked, share
from mpidl.data.datastore import Datastore
from mpidl.data.loading.feed import Feed, FeedBuilder, label_bounds
from mpidl.data.queue import MinibatchQueue
from mpidl.data.transforms.draws import SampleKeys

MOVES = ("mirrored", "top", "left")  # augmentations that are given by one integer per image
RESIDENT = 0.5  # fraction of a device's free memory that its ranks may use for resident data sets
UPLOADED = 64 << 20  # number of bytes of a data set that are read and uploaded at a time


class DeviceQueue(MinibatchQueue):
    """A MinibatchQueue that delivers pairs (Feed, None) to a recorded training step.

    A Feed holds the sample numbers of a mini-batch. If the data set is not resident in device
    memory, the Feed also holds the pixels, and the labels or targets. A smaller last mini-batch is
    divided among the ranks at the same block boundaries as a full mini-batch, because a recorded
    step always reads the same blocks.
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
        # Size in bytes of an image with its label or target.
        self.image_bytes = int(np.prod(p.read_shape)) * p.dtype.itemsize
        if p.labels is not None:
            self.image_bytes += int(np.prod(p.labels.shape)) * p.labels.dtype.itemsize
        room = RESIDENT * world.device.free_memory() / world.device.sharers
        # Pixels that the host computes may differ in each epoch, so they are always uploaded.
        # A resident data set would also need the pixels of skipped images.
        is_fixed = not p.changes_pixels and self.bad_images is None
        # Whether device memory holds the whole data set. A data set is resident if it fits
        # in half of the free memory, the host does not change pixels, and images that
        # cannot be read are not skipped. A caller may set this to False before `reader` is
        # called, to save memory.
        self.resident = len(datastore) * self.image_bytes <= room and is_fixed
        # This rank's Batch of a full mini-batch.
        self.full_batch = share(
            self.batch_size, world, seed=seed, load=self.load, device=world.counts
        )

    def epoch(self, epoch, start=0):
        """Generate (Feed, None) for each mini-batch of an epoch, starting at index `start`."""
        self.device = None  # the base class must not upload, because `Reader.values` uploads
        return super().epoch(epoch, start)

    def _shares(self, count):
        runs = self.full_batch.tree.runs
        return [tuple(min(edge * LANES, count) for edge in run) for run in runs]

    def _builder(self, indices, epoch, is_ahead):
        first, stop = self._shares(len(indices))[self.world.rank]
        batch = share(len(indices), self.world, indices=indices, epoch=epoch, seed=self.seed)
        return FeedBuilder(self.pipeline, batch, indices[first:stop], read=not self.resident)

    def reader(self) -> Reader:
        """Return a Reader of this data set.

        Call this method once, before the step is recorded.
        """
        return Reader(self)


class Table:
    """An array in device memory with one entry per image: its pixels, or its label or target.

    If the data set is resident, the array holds the entries of all `count` images. Otherwise,
    `count` is None, and the array holds the entries of up to ROWS mini-batches in progress. The
    host then writes each share of up to `size` images to pinned memory, and a second stream uploads
    this memory.
    """

    def __init__(
        self, device: Any, shape: tuple[int, ...], dtype: np.dtype, count: int | None, size: int
    ):
        self.device, self.size = device, size
        self.staged: Any = None
        rows = ROWS * size if count is None else count
        self.values = launching.persistent((rows, *shape), dtype)
        self.bounds = array.Bounds()
        if count is None:
            nbytes = self.values.nbytes
            self.staged = device.pinned(nbytes).view(dtype).reshape(ROWS, size, *shape)

    def put(self, start: int, values: np.ndarray) -> None:
        """Upload the entries of consecutive images of the data set, starting at index `start`."""
        offset = start * int(np.prod(values.shape[1:], dtype=np.int64))
        launching.upload(self.values.part(offset, values.shape), np.ascontiguousarray(values))
        bounds, earlier = label_bounds(values), self.bounds.limits
        if bounds is not None:
            low, high = bounds if earlier is None else earlier
            self.bounds.limits = min(low, bounds[0]), max(high, bounds[1])

    def stage(self, row: int, values: np.ndarray) -> None:
        """Upload the entries of a mini-batch to part `row` of the array, 0..ROWS-1.

        Kernels that are launched after this call wait for the upload.
        """
        staged = self.staged[row, : len(values)]
        staged[...] = values
        target = self.values.row(row * self.size)  # the first image of the part
        self.device.after(self.device.stage(target.address, staged))


class Reader:
    """Provider of images, labels and other arguments for a recorded training step.

    If the data set is resident, device memory holds all images in the order of the datastore.
    Otherwise, device memory holds only the mini-batches in progress.
    """

    def __init__(self, queue: DeviceQueue):
        self.full_batch, self.device = queue.full_batch, queue.world.device
        self.pipeline, self.resident = queue.pipeline, queue.resident
        # Whether the sample numbers are row numbers of the tables.
        self.is_direct = self.resident and queue.sampling != "balanced"
        p, (first, stop) = self.pipeline, self.full_batch.images
        self.size = max(stop - first, 1)
        count = len(queue.datastore) if self.resident else None
        self.pixels = Table(self.device, p.read_shape, p.dtype, count, self.size)
        self.labels: Table | None = None
        if p.labels is not None:
            self.labels = Table(self.device, *p.labels, count, self.size)
        if self.resident:
            self._upload(count, max(1, UPLOADED // max(1, queue.image_bytes)))

    def _upload(self, count, step):
        """Upload the whole data set, `step` images at a time."""
        for start in range(0, count, step):
            indices = np.arange(start, min(start + step, count))
            pixels, labels = self.pipeline.read(SampleKeys(indices, 0, 0))
            self.pixels.put(start, pixels)
            if self.labels is not None and labels is not None:
                self.labels.put(start, labels)
            self.device.synchronize()  # finish before the host arrays are freed

    def read(self) -> tuple[Blocked, Blocked | None]:
        """Return (images, labels) for the training step being recorded; labels may be None."""
        batch, normalization = self.full_batch, self.pipeline.normalization
        zeros = np.zeros(batch.blocks * LANES, np.int32)
        samples = launching.scalar("samples", zeros, np.int32)
        launching.scalar("epoch", 0, np.int32)  # read by `Batch.samples`
        places = samples if self.is_direct else launching.scalar("places", zeros, np.int32)
        layout = {"indices": places, "counts": batch.counts(), "blocks": batch.blocks}
        options = self.pipeline.moves(SampleKeys(zeros, 0, 0))
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
        """Upload the pixels and labels of a Feed; return the keyword arguments of `Program.run`.

        `row` is the part of each Table to upload to, 0..ROWS-1, which no unfinished training step
        may read. Raises ValueError if an op of the recorded training step rejects the labels.
        """
        count = len(feed.indices)
        numbers = {"samples": feed.indices}
        numbers |= {name: feed.moves[name] for name in MOVES if name in feed.moves}
        if self.resident and not self.is_direct:
            numbers["places"] = self.pipeline.image_indices(feed.indices)
        if feed.pixels is not None:  # the data set is not resident
            numbers["places"] = row * self.size + np.arange(count)
            if count:
                self.pixels.stage(row, feed.pixels)
            if self.labels is not None and feed.labels is not None:
                if feed.bounds is not None:
                    self.labels.bounds.say(*feed.bounds)
                if count:
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
