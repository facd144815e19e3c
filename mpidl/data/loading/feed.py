"""Prepare mini-batches in host memory and upload them to a GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from mpidl.core.blocks import LANES, Batch, Blocked, blocks_of
from mpidl.data.loading.bad_images import Unreadable
from mpidl.data.loading.builders import ShareBuilder
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


class FeedBuilder(ShareBuilder):
    """Builder of (Feed, None). With `read` False, pixels and labels are already on the device."""

    def __init__(self, pipeline: Pipeline, batch: Batch, indices: np.ndarray, read: bool = True):
        super().__init__(pipeline, batch, indices, blocks_of(len(indices)) if read else 0)
        n, kind = len(indices), pipeline.labels
        self.run_bounds: list[tuple[int, int] | None] = []  # label bounds of each `store`
        self.moves: dict = {}
        self.pixels: np.ndarray | None = None
        self.labels: np.ndarray | None = None
        if read:
            self.pixels = np.empty((n, *pipeline.read_shape), pipeline.dtype)
            self.labels = None if kind is None else np.empty((n, *kind.shape), kind.dtype)

    def job(self, workers: int) -> Job:
        job = super().job(workers)
        job.tasks.insert(0, self._plan)
        return job

    def _plan(self):
        self.moves = self.pipeline.moves(self.keys)

    def store(
        self, first: int, keys: SampleKeys, pixels: np.ndarray, labels: np.ndarray | None
    ) -> None:
        run = slice(first * LANES, first * LANES + len(pixels))
        if self.pixels is not None:
            self.pixels[run] = pixels
        if self.labels is not None:
            self.labels[run] = labels
            self.run_bounds.append(label_bounds(labels))

    def item(self) -> tuple[Feed, None]:
        runs = [pair for pair in self.run_bounds if pair is not None]
        bounds = (min(a for a, _ in runs), max(b for _, b in runs)) if runs else None
        indices = self.keys.indices
        return Feed(self.batch, indices, self.pixels, self.labels, bounds, self.moves), None


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
