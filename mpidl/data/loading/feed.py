"""Prepare mini-batches in host memory and upload them to a GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from mpidl.core.blocks import LANES, Batch, Blocked, blocks_of
from mpidl.data.loading.bad_images import Unreadable
from mpidl.data.loading.pipeline import Pipeline
from mpidl.data.loading.workers import Job
from mpidl.data.transforms.draws import SampleKeys


class Feed(NamedTuple):
    """This rank's share of a mini-batch in host memory."""

    batch: Batch
    indices: np.ndarray  # sample indices of this rank's images, (n,)
    # The result of `Pipeline.read`: (n, C, H, W) and (n, *labels_shape). Both are None if the
    # images are already on the device. `labels` is also None if the data set has no labels or
    # targets.
    pixels: np.ndarray | None
    labels: np.ndarray | None
    # Smallest and largest label. None if there are no labels or the labels are floats.
    bounds: tuple[int, int] | None
    moves: dict  # the result of `Pipeline.moves`


class FeedBuilder:
    """Builder of a Feed.

    Its Job has tasks that run in worker threads. With `read` False, pixels and labels are already
    on the device.
    """

    def __init__(self, pipeline: Pipeline, batch: Batch, indices: np.ndarray, read: bool = True):
        self.pipeline, self.batch, self.indices = pipeline, batch, indices
        self.pixels = self.labels = None
        self.fetches: object = None  # the result of `Datastore.read_ahead`
        self.unreadable_images: dict[int, str] | None = None  # see `Pipeline.read_or_find`
        self.run_bounds: list[tuple[int, int] | None] = []  # label bounds of each `_read`
        self.moves: dict = {}
        self.blocks = blocks_of(len(indices)) if read else 0
        if read:
            p, n = pipeline, len(indices)
            self.pixels = np.empty((n, *p.read_shape), p.dtype)
            if p.labels_shape is not None:
                self.labels = np.empty((n, *p.labels_shape), p.labels_dtype)

    def job(self, workers: int) -> Job:
        """Return a Job for `workers` threads, whose result is (Feed, None) or Unreadable."""
        return Job(
            [self._plan, *self.pipeline.tasks(self._read, self.blocks, workers)], self._result
        )

    def _plan(self):
        keys = SampleKeys(self.indices, self.batch.epoch, self.batch.seed)
        self.moves = self.pipeline.moves(keys)

    def _read(self, first, stop):
        """Read the pixels and labels of the 16-image blocks first..stop-1."""
        run = slice(first * LANES, stop * LANES)
        keys = SampleKeys(self.indices[run], self.batch.epoch, self.batch.seed)
        data = self.pipeline.read_or_find(keys, self.unreadable_images)
        if data is None:
            return
        pixels, labels = data
        self.pixels[run] = pixels
        if self.labels is not None:
            self.labels[run] = labels
            self.run_bounds.append(label_bounds(labels))

    def _result(self):
        if self.unreadable_images:
            return Unreadable(self.unreadable_images)
        runs = [pair for pair in self.run_bounds if pair is not None]
        bounds = (min(a for a, _ in runs), max(b for _, b in runs)) if runs else None
        return Feed(self.batch, self.indices, self.pixels, self.labels, bounds, self.moves), None


def label_bounds(labels: np.ndarray | None) -> tuple[int, int] | None:
    """Return (smallest, largest) of integer labels, or None for floats and empty arrays."""
    if labels is None or labels.dtype.kind == "f" or not labels.size:
        return None
    return int(labels.min()), int(labels.max())


def upload_feeds(
    feeds: Generator[tuple[Feed, None]], pipeline: Pipeline
) -> Generator[tuple[Blocked, Blocked | None]]:
    """Upload each (Feed, None) in the calling thread, and yield (images, labels) on the GPU.

    `Unreadable` items are yielded unchanged.
    """
    with contextlib.closing(feeds):
        # map() keeps no reference to a Feed, so the next mini-batch can reuse its memory.
        yield from map(functools.partial(_upload, pipeline.normalization.arrays()), feeds)


def _upload(statistics, item):
    """Upload one (Feed, None), normalize it, and return (images, labels) on the GPU."""
    if isinstance(item, Unreadable):
        return item
    # Local imports: only ranks with a GPU import the GPU backend.
    from mpidl.backends.gpu import array
    from mpidl.backends.gpu import images as gpu_images

    feed, _ = item
    batch, labels = feed.batch, None
    layout = {"counts": batch.counts(), "blocks": batch.blocks}
    options = {
        name: array.plain(value) if isinstance(value, np.ndarray) else value
        for name, value in (feed.moves | statistics).items()
    }
    images = gpu_images.images(array.plain(feed.pixels), **options, **layout)
    if feed.labels is not None:
        lanes = gpu_images.targets(array.plain(feed.labels), **layout)
        lanes.bounds = array.Bounds(feed.bounds)
        labels = Blocked(lanes, batch)
    return Blocked(images, batch), labels
