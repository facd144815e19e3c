"""Call the `function` of a queue, and check what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpidl.core.blocks import LANES
from mpidl.data.checks import check_finite
from mpidl.data.datastore import Datastore
from mpidl.data.transforms.draws import SampleKeys
from mpidl.errors import UserError


class Kind(NamedTuple):
    """Shape and type of one image, label or target of a mini-batch."""

    shape: tuple[int, ...]
    dtype: np.dtype


Data = tuple[np.ndarray, np.ndarray | None]  # images (n, C, H, W), and labels or targets (n, ...)


class UserFunction:
    """The `function` of a queue, which must return the same shapes and types for all images.

    `kinds` are those of image 0: of the image, and of its label or None.
    """

    def __init__(self, function: Callable[..., Any], datastore: Datastore):
        self.function, self.datastore = function, datastore
        self.kinds: tuple[Kind, Kind | None] | None = None

    def __call__(self, images: np.ndarray, labels: np.ndarray | None, keys: SampleKeys) -> Data:
        """Call the function once per block of 16 images, so that its input does not depend on how
        many images a task reads.
        """
        outputs = []
        for first in range(0, len(images), LANES):
            block = slice(first, first + LANES)
            of_block = keys._replace(indices=keys.indices[block])
            block_labels = None if labels is None else labels[block]
            outputs.append(
                self._checked_call(np.ascontiguousarray(images[block]), block_labels, of_block)
            )
        results = [labels for _, labels in outputs if labels is not None]
        return np.concatenate([images for images, _ in outputs]), (
            np.concatenate(results) if results else None
        )

    def _checked_call(self, images, labels, keys):
        n, indices = len(images), np.asarray(keys.indices) % len(self.datastore)
        output = self.function(images, labels, keys)
        images, labels = output if isinstance(output, tuple) else (output, labels)
        images = np.asarray(images)
        images = images.astype(np.float32) if images.dtype.kind == "f" else images
        if images.ndim != 4 or len(images) != n or images.dtype not in (np.uint8, np.float32):
            raise UserError(
                f"function: expected {n} images, uint8 or float, of shape ({n}, C, H, W), got "
                f"{images.dtype} of shape {images.shape}"
            )
        if labels is not None:
            labels = np.asarray(labels)
            if labels.shape[:1] != (n,) or labels.dtype.kind not in "biuf":
                raise UserError(
                    f"function: expected labels or targets of {n} images, got {labels.dtype} of "
                    f"shape {labels.shape}"
                )
            labels = labels.astype(np.float32 if labels.dtype.kind == "f" else np.int32)
            check_finite(labels, self.datastore, indices, "targets")
        check_finite(images, self.datastore, indices, "pixels")
        image_kind = Kind(images.shape[1:], images.dtype)
        kinds = image_kind, None if labels is None else Kind(labels.shape[1:], labels.dtype)
        if self.kinds is None:
            self.kinds = kinds
        elif kinds != self.kinds:
            raise UserError(
                "function: expected the same shapes and types as for image 0 "
                f"({_text(*self.kinds)}), got {_text(*kinds)} of "
                f"{self.datastore.located(int(indices[0]))}"
            )
        return images, labels


def _text(images, labels):
    text = f"{images.dtype} images of {'x'.join(map(str, images.shape))}"
    if labels is None:
        return f"{text} without labels"
    return f"{text} with {labels.dtype} labels of shape {labels.shape}"
