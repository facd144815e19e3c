"""Prepare mini-batches of images that are in memory, on the threads that compute."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.images import MemoryImages
from mpidl.data.loading.pipeline import Pipeline
from mpidl.data.transforms.draws import SampleKeys


class Gatherer:
    """Prepares mini-batches without first copying their images, if the images are in memory.

    The settings of the pipeline and its datastore may change.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        # The images of the last call, and the objects from which they were made.
        self._images: MemoryImages | None = None
        self._sources: tuple[Any, ...] = (None,)

    def fill(
        self,
        keys: SampleKeys,
        lanes: np.ndarray,
        labels: np.ndarray | None,
    ) -> bool:
        """Write the images of samples (n,) to `lanes` (blocks, C, P, Q, 16) float32, and their
        labels to (blocks, 16) int32, or return False. The result is False if the images are not in
        memory, or if more is to be done than to move and normalize them, or if the data are
        invalid; `Pipeline.read` then raises the error. Only the consumer's thread may call this
        method, because it uses the threads that compute.
        """
        images = self._memory_images()
        if images is None:
            return False
        moves = self.pipeline.moves(keys)
        moves.pop("size", None)
        return images.prepare(keys.indices, lanes, labels, **moves)

    def _memory_images(self):
        """Return the MemoryImages for the current datastore and settings, or None."""
        p = self.pipeline
        images, labels = p.datastore.array(), p.datastore.labels
        if images is None:
            return None
        settings = p.classes, p.ignore_label, p.augmenter, p.normalization, p.crop
        sources = images, labels, *settings, p.function, p.mixing
        if not all(map(operator.is_, sources, self._sources)):
            self._sources, self._images = sources, None
            if _can_gather(p, images, labels):
                rules = p.classes, p.ignore_label, p.image_shape[1:]
                self._images = MemoryImages(images, labels, *rules, **p.normalization.arrays())
        return self._images


def _can_gather(pipeline, images, labels):
    """Return whether a kernel can prepare these images and labels as the pipeline does."""
    store = pipeline.datastore
    has_float_images = images.dtype == np.float32
    is_moved = pipeline.augmenter is not None or pipeline.image_shape != images.shape[1:]
    return (
        kernels() is not None
        and not pipeline.changes_pixels
        and store.targets_shape is None
        and (images.dtype == np.uint8 or (has_float_images and not is_moved))
        and images.flags.c_contiguous
        and images.shape == (len(store), *store.image_shape)
        and (labels is None) == (pipeline.labels is None)
        and (labels is None or _are_plain(labels, len(images)))
    )


def _are_plain(labels, count):
    """Return whether the labels are an array of `count` numbers that a kernel can read."""
    return (
        isinstance(labels, np.ndarray)
        and labels.dtype == np.int64
        and labels.shape == (count,)
        and labels.flags.c_contiguous
    )
