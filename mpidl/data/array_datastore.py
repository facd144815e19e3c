"""Image sets in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mpidl.data.datastore import Datastore, Indices, counted
from mpidl.errors import UserError
from mpidl.files import digest
from mpidl.matlab_names import explain_arguments
from mpidl.text import did_you_mean, name_list, printable, sorted_classes

# images, and their labels or targets
Arrays: TypeAlias = tuple[np.ndarray, Sequence[int] | Sequence[str] | np.ndarray]

MOST_CLASSES = 1 << 20  # maximum number of classes of a set without class names


class ArrayDatastore(Datastore):
    """A datastore of images in memory.

    Parameters
    ----------
    images : array_like
        Images (n, C, H, W), or (n, H, W) if gray, as uint8 pixels or floats. Floats are stored as
        float32 and are not rescaled.
    labels : array_like of int or str, optional
        Label of each image, (n,) or (n, 1): integers of at least 0, or class names.
    classes : sequence of str, optional
        Class names in the order of the labels. The default is "0", "1", ..., or the sorted names in
        `labels`. Objects other than strings are converted by `str`.
    source : str
        Name of the set in messages.
    targets : array_like, optional
        Target of each image, (n, ...), as floats or whole numbers. Examples are 0 or 1 for each of
        K labels (n, K), a label per pixel (n, H, W), and another image. If given, mini-batches hold
        the targets instead of the labels. Floats are stored as float32, whole numbers as int32.
    layout : {"NCHW", "NHWC"}, optional
        Order of the axes of four-dimensional images. By default, they are (n, C, H, W), and an
        array that looks like (n, H, W, C) is an error.

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
        labels: Sequence[int] | Sequence[str] | np.ndarray | None = None,
        classes: Sequence[object] | None = None,
        source: str = "arrays",
        *,
        targets: np.ndarray | None = None,
        layout: str | None = None,
    ):
        images = np.asarray(images)
        if layout not in (None, "NCHW", "NHWC"):
            raise UserError(f"{source}: layout must be NCHW or NHWC, got {layout!r}")
        if images.ndim == 4 and layout == "NHWC":
            images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        elif layout is None:
            check_channels_first(images.shape, source)
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
            if (names := label_names(labels)) is not None:
                self.classes = sorted_classes(names) if classes is None else self.classes
                labels = label_numbers(names, self.classes, source)
                classes = self.classes
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


def as_datastore(candidate: object, role: str) -> Datastore:
    """Return a datastore: the candidate, or an `ArrayDatastore` of a tuple (images, labels).

    Class names and whole numbers, one per image, are labels. Other arrays are targets. Raises
    UserError if the candidate is anything else. `role` names the argument in the message.
    """
    if isinstance(candidate, Datastore):
        return candidate
    if isinstance(candidate, tuple) and len(candidate) == 2:
        images, labels = candidate
        values = np.asarray(labels)
        is_flat = values.shape in (values.shape[:1], (*values.shape[:1], 1))
        if label_names(labels) is not None or (is_flat and values.dtype.kind in "iu"):
            return ArrayDatastore(images, labels)
        return ArrayDatastore(images, targets=values)
    hint = ""
    if isinstance(candidate, str | os.PathLike):
        hint = ": use dl.ImageFolder(folder)"
    elif isinstance(candidate, tuple | list | np.ndarray):
        hint = ": use dl.ArrayDatastore(images, labels) or a tuple (images, labels)"
    elif isinstance(getattr(candidate, "datastore", None), Datastore):
        hint = ": use queue.datastore, the images of the queue"
    raise UserError(f"{role}: expected a datastore, found {type(candidate).__name__}{hint}")


def check_channels_first(shape: Sequence[int], source: str) -> None:
    """Raise UserError if a shape looks like (n, H, W, C) instead of (n, C, H, W)."""
    if len(shape) == 4 and shape[3] in (1, 3, 4) and shape[1] not in (1, 3, 4):
        if min(shape[1:3]) > shape[3]:
            raise UserError(
                f"{source}: expected images (n, C, H, W), found {tuple(shape)}, which looks like "
                "(n, H, W, C): use images.transpose(0, 3, 1, 2); for images that do have "
                f'{shape[1]} channels, use dl.ArrayDatastore(images, labels, layout="NCHW")'
            )


def label_names(labels: object) -> list[str] | None:
    """Return labels that are class names as strings, or None for any other labels."""
    try:
        values = np.asarray(labels)
    except ValueError:  # lists of different lengths
        return None
    if values.dtype.kind not in "OSU" or values.ndim == 0 or values.size != len(values):
        return None
    names = values.reshape(-1).tolist()
    if not names or not all(isinstance(name, str | bytes) for name in names):
        return None
    return [os.fsdecode(name) for name in names]


def label_numbers(names: Sequence[str], classes: Sequence[str], source: str) -> np.ndarray:
    """Return the number of each name in `classes`. Raise UserError if a name is unknown."""
    numbers = {name: i for i, name in enumerate(classes)}
    unknown = next((name for name in names if name not in numbers), None)
    if unknown is not None:
        raise UserError(
            f"{source}: label {printable(unknown)} is not one of the classes "
            f"({name_list(classes)}){did_you_mean(unknown, classes)}"
        )
    return np.array([numbers[name] for name in names], np.int64)


def checked_targets(targets: np.ndarray, count: int, source: str) -> np.ndarray:
    """Check the targets of `count` images and return them as float32 or int32.

    `source` names the targets in messages. Raises UserError if the number of targets is not
    `count`, or if the targets are neither floats nor whole numbers in the range of int32.
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
    check_int32(targets, source)
    return targets.astype(np.int32)


def check_int32(targets: np.ndarray, source: str) -> None:
    """Raise UserError if an integer target is outside the range of int32."""
    low, high = int(targets.min(initial=0)), int(targets.max(initial=0))
    if low < -(1 << 31) or high >= 1 << 31:
        raise UserError(f"{source}: expected targets in the range of int32, found {low} to {high}")


def check_labels(
    labels: Sequence[Any] | np.ndarray, count: int, classes: Sequence[object] | None, source: str
) -> np.ndarray:
    """Check labels and return them as int64 (count,).

    Raises UserError if the number of labels is not `count`, or if a label is negative, is not a
    whole number, or is not below the number of classes. If `classes` is None, labels are below
    `MOST_CLASSES`. `source` names the labels in messages.
    """
    labels = np.asarray(labels)
    labels = labels[:, 0] if labels.shape == (count, 1) else labels
    if labels.shape != (count,):
        raise UserError(
            f"{source}: expected one label per image, ({count},), got labels of shape "
            f"{labels.shape}"
        )
    if count and (labels.dtype.kind not in "iu" or labels.min() < 0):
        actual = labels.min() if labels.dtype.kind == "i" else labels.dtype
        hint = "" if labels.dtype.kind in "iu" else " (labels may also be class names)"
        raise UserError(f"{source}: expected whole numbers from 0 as labels, got {actual}{hint}")
    if classes is not None and count and labels.max() >= len(classes):
        raise UserError(
            f"{source}: expected labels below {len(classes)}, the number of classes (labels "
            f"start at 0), got {labels.max()}"
        )
    if classes is None and count and labels.max() >= MOST_CLASSES:
        raise UserError(f"{source}: expected labels below {MOST_CLASSES}, got {labels.max()}")
    return labels.astype(np.int64)
