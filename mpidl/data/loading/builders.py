"""Prepare this rank's share of a mini-batch, in tasks for worker threads."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.core.blocks import LANES, Batch, Blocked
from mpidl.data.loading.bad_images import Unreadable
from mpidl.data.loading.gathering import Gatherer
from mpidl.data.loading.pipeline import Pipeline, fill_blocks
from mpidl.data.loading.workers import Job
from mpidl.data.parts import PartedBatch
from mpidl.data.transforms.draws import SampleKeys


class ShareBuilder(abc.ABC):
    """Base class of the builders of a share. `indices` are the sample numbers of its images.

    A subclass defines `store`, which receives the images and labels of some blocks, and `item`,
    which returns the prepared share.
    """

    def __init__(self, pipeline: Pipeline, batch: Any, indices: np.ndarray, blocks: int):
        self.pipeline, self.batch, self.blocks = pipeline, batch, blocks
        self.keys = SampleKeys(indices, batch.epoch, batch.seed)
        self.fetches: object = None  # the result of `Datastore.read_ahead`
        self.unreadable_images: dict[int, str] | None = None  # see `Pipeline.read_or_find`

    def read_ahead(self) -> None:
        """Request the images, which are read soon."""
        if self.blocks:
            indices = self.pipeline.image_indices(self.keys.indices)
            self.fetches = self.pipeline.datastore.read_ahead(indices)

    def job(self, workers: int) -> Job:
        """Return a Job for `workers` threads, whose result is the item or Unreadable."""
        return Job(self.pipeline.tasks(self.read, self.blocks, workers), self._result)

    def read(self, first: int, stop: int) -> None:
        """Read and prepare the 16-image blocks first..stop-1 of this rank's share."""
        keys = self.keys._replace(indices=self.keys.indices[first * LANES : stop * LANES])
        data = self.pipeline.read_or_find(keys, self.unreadable_images)
        if data is not None:
            self.store(first, keys, *data)

    @abc.abstractmethod
    def store(
        self, first: int, keys: SampleKeys, pixels: np.ndarray, labels: np.ndarray | None
    ) -> None:
        """Store the images and labels that `Pipeline.read` returned, from block `first` on."""

    @abc.abstractmethod
    def item(self) -> Any:
        """Return the prepared share."""

    def _result(self):
        return Unreadable(self.unreadable_images) if self.unreadable_images else self.item()


class BatchBuilder(ShareBuilder):
    """Builder of a share on the CPU as (images, labels), with memory from an arena.

    `gatherer` is None unless the consumer's thread reads.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        batch: Batch | PartedBatch,
        arena: arenas.Arena,
        gatherer: Gatherer | None,
    ):
        super().__init__(pipeline, batch, batch.indices, batch.blocks)
        self.gatherer, blocks, kind = gatherer, batch.blocks, pipeline.labels
        self.lanes = arenas.empty((blocks, *pipeline.image_shape, LANES), arena=arena)
        self.labels: np.ndarray | None = None
        if kind is not None:
            self.labels = arenas.empty((blocks, *kind.shape, LANES), kind.dtype, arena)

    def read(self, first: int, stop: int) -> None:
        if self.gatherer is not None:
            keys = self.keys._replace(indices=self.keys.indices[first * LANES : stop * LANES])
            labels = None if self.labels is None else self.labels[first:stop]
            if self.gatherer.fill(keys, self.lanes[first:stop], labels):
                return
        super().read(first, stop)

    def store(
        self, first: int, keys: SampleKeys, pixels: np.ndarray, labels: np.ndarray | None
    ) -> None:
        p, stop = self.pipeline, first + -(-len(pixels) // LANES)
        fill_blocks(pixels, p.moves(keys), p.normalization.arrays(), self.lanes[first:stop])
        if labels is None or self.labels is None:
            return
        full, rest = divmod(len(labels), LANES)  # only the last block can have fewer images
        blocks = labels[: full * LANES].reshape(full, LANES, *labels.shape[1:])
        blocks = blocks if labels.ndim == 1 else np.moveaxis(blocks, 1, -1)
        self.labels[first : first + full] = blocks
        if rest:
            self.labels[first + full, ..., :rest] = np.moveaxis(labels[-rest:], 0, -1)
            self.labels[first + full, ..., rest:] = 0

    def item(self) -> tuple[Blocked, Blocked | None]:
        labels = None if self.labels is None else Blocked(self.labels, self.batch)
        return Blocked(self.lanes, self.batch), labels
