"""Combine images and targets into one datastore."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidl.data.array_datastore import check_int32
from mpidl.data.checks import read_images
from mpidl.data.datastore import Datastore, Derived, Indices, counted
from mpidl.errors import UserError
from mpidl.files import digest


class Combined(Derived):
    """A datastore that pairs the images of one set with the targets of another."""

    def __init__(
        self,
        images: Datastore,
        targets: Datastore | np.ndarray,
        pixel_labels: bool = False,
        classes: Sequence[str] | None = None,
    ):
        noun = "targets" if isinstance(targets, Datastore) else "numbers"
        if len(images) != len(targets):
            raise UserError(
                f"combined: expected as many {noun} as images, found {len(targets)} for "
                f"{images.describe()}"
            )
        super().__init__(images)
        self.target_source = targets
        self.in_memory, self.preprocess = images.in_memory, images.preprocess
        self.scaled = False  # whether targets are pixels to divide by 255
        is_whole = targets.dtype.kind != "f"
        if isinstance(targets, Datastore):
            self.in_memory = images.in_memory and targets.in_memory
            self.scaled = targets.dtype == np.uint8 and not pixel_labels
            is_whole = pixel_labels
            shape = _label_map_shape(targets) if pixel_labels else targets.image_shape
        else:
            if targets.dtype.kind not in "iufb":
                raise UserError(f"combined: expected numbers as targets, got {targets.dtype}")
            if is_whole:
                check_int32(targets, "combined")
            shape = targets.shape[1:]
        self.targets_shape: tuple[int, ...] = shape
        self.targets_dtype = np.dtype(np.int32 if is_whole else np.float32)
        if classes is None:
            return
        if not is_whole:
            raise UserError(
                "combined: classes requires targets that are labels: whole numbers, or images "
                "with pixel_labels=True"
            )
        self.classes = [str(name) for name in classes]

    def targets(self, indices: Indices) -> np.ndarray:
        source, dtype = self.target_source, self.targets_dtype
        if not isinstance(source, Datastore):
            return source[np.asarray(indices, np.int64)].astype(dtype, copy=False)
        pixels = read_images(source, indices)
        if self.scaled:  # the images of a mini-batch are scaled in the same way
            return pixels / np.float32(255)
        return pixels.reshape(len(pixels), *self.targets_shape).astype(dtype, copy=False)

    def read_ahead(self, indices: Indices) -> object:
        source = self.target_source
        targets = source.read_ahead(indices) if isinstance(source, Datastore) else None
        return self.parent.read_ahead(indices), targets

    def encoded_sizes(self) -> np.ndarray | None:
        return self.parent.encoded_sizes()

    def read_encoded(self, indices: Indices) -> list[bytes]:
        return self.parent.read_encoded(indices)

    def describe(self) -> str:
        return f"{self.parent.describe().rpartition(': ')[0] or 'combined'}: {counted(self)}"

    def fingerprint(self) -> str:
        source = self.target_source
        part = source.fingerprint() if isinstance(source, Datastore) else source
        return digest(self.parent.fingerprint(), part, self.targets_shape, self.targets_dtype.str)


def _label_map_shape(targets):
    """Return the size (H, W) of label images; raise UserError unless the images are gray uint8."""
    if targets.dtype != np.uint8 or targets.image_shape[0] != 1:
        raise UserError(
            f"{targets.describe()}: expected gray uint8 images as pixel labels, found "
            f"{targets.dtype} in {targets.image_shape[0]} channel(s)"
        )
    return targets.image_shape[1:]


def combined(
    images: Datastore,
    targets: Datastore | np.ndarray,
    *,
    pixel_labels: bool = False,
    classes: Sequence[str] | None = None,
) -> Combined:
    """Pair each image of a set with a target.

    Parameters
    ----------
    images : Datastore
        The images.
    targets : Datastore or array_like
        Either a datastore whose image i is the target of image i in `images`, or an array (n, ...)
        of floats (for regression) or whole numbers. uint8 pixels of a datastore are divided by 255,
        like the images of a mini-batch. Floats stay unchanged.
    pixel_labels : bool
        Whether the targets are gray uint8 images whose pixels are labels. If so, each target is
        an int32 array (H, W).
    classes : sequence of str, optional
        Class names in the order of the labels, if the targets are labels. Confusion tables show
        these names.

    Returns
    -------
    Combined
        A datastore of the images and their targets.

    Raises
    ------
    UserError
        If the numbers of images and targets differ, the type of the targets is not supported, or
        `classes` is given for targets that are not labels.
    """
    targets = targets if isinstance(targets, Datastore) else np.asarray(targets)
    return Combined(images, targets, pixel_labels, classes)
