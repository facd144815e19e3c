"""Image sets in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidl.data.datastore import Datastore, Indices, counted
from mpidl.errors import UserError
from mpidl.files import digest
from mpidl.matlab_names import explain_arguments

MOST_CLASSES = 1 << 20  # maximum number of classes of a set without class names


class ArrayDatastore(Datastore):
    """A datastore of images in memory.

    Parameters
    ----------
    images : array_like
        Images (n, C, H, W), or (n, H, W) if gray, as uint8 pixels or floats. Floats are stored as
        float32 and are not rescaled.
    labels : array_like of int, optional
        Label of each image, (n,), integers of at least 0.
    classes : sequence of str, optional
        Class names in the order of the labels, by default "0", "1", ... Objects other than
        strings are converted by `str`.
    source : str
        Name of the set in messages.
    targets : array_like, optional
        Target of each image, (n, ...), as floats or whole numbers. Examples are 0 or 1 for each of
        K labels (n, K), a label per pixel (n, H, W), and another image. If given, mini-batches hold
        the targets instead of the labels. Floats are stored as float32, whole numbers as int32.

    Raises
    ------
    UserError
        If the shapes or types are invalid, or a label is not below the number of classes.
    """

    in_memory = True

    @explain_arguments
    def __init__(
        self,
        images: np.ndarray,
        labels: Sequence[int] | np.ndarray | None = None,
        classes: Sequence[object] | None = None,
        source: str = "arrays",
        *,
        targets: np.ndarray | None = None,
    ):
        images = np.asarray(images)
        images = images[:, None] if images.ndim == 3 else images
        if images.ndim != 4 or not (images.dtype == np.uint8 or images.dtype.kind == "f"):
            raise UserError(
                f"{source}: expected uint8 or float images of shape (n, C, H, W) or (n, H, W), "
                f"got {images.dtype} of shape {images.shape}"
            )
        with np.errstate(over="ignore"):  # `read_images` later reports infinities
            floats = images.dtype != np.uint8
            self.images: np.ndarray = images.astype(np.float32, copy=False) if floats else images
        self.image_shape = tuple(int(size) for size in images.shape[1:])
        self.dtype = self.images.dtype
        self.source = source
        self.classes = [] if classes is None else [str(name) for name in classes]
        if labels is not None:
            self.labels = check_labels(labels, len(images), classes, source)
            if classes is None:
                self.classes = [str(i) for i in range(int(self.labels.max(initial=-1)) + 1)]
        self._targets = None if targets is None else checked_targets(targets, len(images), source)
        if self._targets is not None:
            self.targets_shape = tuple(int(size) for size in self._targets.shape[1:])
            self.targets_dtype = self._targets.dtype

    def __len__(self) -> int:
        return len(self.images)

    def read(self, indices: Indices) -> np.ndarray:
        return self.images.take(np.asarray(indices, np.int64), 0)

    def array(self) -> np.ndarray | None:
        # a subclass or an instance with another `read` may change the pixels
        is_read = type(self).read is ArrayDatastore.read and "read" not in vars(self)
        return self.images if is_read else None

    def targets(self, indices: Indices) -> np.ndarray:
        if self._targets is None:
            return super().targets(indices)
        return self._targets[np.asarray(indices, np.int64)]

    def located(self, i: int) -> str:
        return f"{self.source}: {self.name(i)}"

    def describe(self) -> str:
        return f"{self.source}: {counted(self)}"

    def fingerprint(self) -> str:
        # Include up to 64 images, to distinguish sets with equal labels and shapes.
        sample = np.linspace(0, max(len(self) - 1, 0), min(len(self), 64)).astype(np.int64)
        parts = [super().fingerprint(), self.images[sample]]
        return digest(*parts, *([] if self._targets is None else [self._targets[sample]]))


def checked_targets(targets: np.ndarray, count: int, source: str) -> np.ndarray:
    """Check the targets of `count` images and return them as float32 or int32.

    `source` names the targets in messages.

    Raises
    ------
    UserError
        If the number of targets is not `count`, or if the targets are neither floats nor whole
        numbers in the range of int32.
    """
    targets = np.asarray(targets)
    if targets.shape[:1] != (count,) or targets.dtype.kind not in "biuf":
        raise UserError(
            f"{source}: expected floats or whole numbers as targets of {count} images, found "
            f"{targets.dtype} of shape {targets.shape}"
        )
    if targets.dtype.kind == "f":
        with np.errstate(over="ignore"):  # `read_targets` later reports infinities
            return targets.astype(np.float32, copy=False)
    low, high = int(targets.min(initial=0)), int(targets.max(initial=0))
    if low < -(1 << 31) or high >= 1 << 31:
        raise UserError(f"{source}: expected targets in the range of int32, found {low} to {high}")
    return targets.astype(np.int32)


def check_labels(
    labels: Sequence[int] | np.ndarray, count: int, classes: Sequence[object] | None, source: str
) -> np.ndarray:
    """Check labels and return them as int64 (count,).

    Parameters
    ----------
    labels : array_like of int
        The labels.
    count : int
        Number of images.
    classes : sequence or None
        Class names; None allows labels below `MOST_CLASSES`.
    source : str
        Name of the labels in messages.

    Raises
    ------
    UserError
        If the number of labels is not `count`, or if a label is negative, is not a whole number, or
        is not below the number of classes.
    """
    labels = np.asarray(labels)
    if labels.shape != (count,):
        raise UserError(
            f"{source}: expected one label per image, ({count},), got labels of shape "
            f"{labels.shape}"
        )
    if count and (labels.dtype.kind not in "iu" or labels.min() < 0):
        actual = labels.min() if labels.dtype.kind == "i" else labels.dtype
        raise UserError(f"{source}: expected whole numbers from 0 as labels, got {actual}")
    if classes is not None and count and labels.max() >= len(classes):
        raise UserError(
            f"{source}: expected labels below {len(classes)}, the number of classes (labels "
            f"start at 0), got {labels.max()}"
        )
    if classes is None and count and labels.max() >= MOST_CLASSES:
        raise UserError(f"{source}: expected labels below {MOST_CLASSES}, got {labels.max()}")
    return labels.astype(np.int64)
