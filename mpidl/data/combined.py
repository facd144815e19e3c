"""Datastores made of others: images paired with targets, images that a function has changed."""

import numpy as np

from mpidl.data.datastore import Datastore, counted, made_of, read_images
from mpidl.data.labels import check_int32
from mpidl.errors import UserError
from mpidl.files import digest


class Combined(Datastore):
    """Two sets as one: images with what they are to be mapped to. See `combined`."""

    def __init__(self, images, targets, pixel_labels=False, classes=None):
        other = "targets" if isinstance(targets, Datastore) else "numbers"
        if len(images) != len(targets):
            raise UserError(
                f"combined: expected as many {other} as images, found {len(targets)} for "
                f"{images.describe()}"
            )
        self.images, self.of = images, targets
        self.image_shape, self.dtype = images.image_shape, images.dtype
        self.labels, self.classes = images.labels, images.classes
        self.in_memory, self.preprocess = images.in_memory, images.preprocess
        self.scaled = False
        if isinstance(targets, Datastore):
            self.targets_shape, self.targets_dtype = targets.image_shape, targets.dtype
            self.in_memory = images.in_memory and targets.in_memory
            if pixel_labels:
                self.targets_shape, self.targets_dtype = _codes(targets), np.dtype(np.int32)
            elif targets.dtype == np.uint8:
                self.scaled, self.targets_dtype = True, np.dtype(np.float32)
            self._name(classes)
            return
        if targets.dtype.kind not in "iufb":
            raise UserError(f"combined: expected numbers as targets, got {targets.dtype}")
        self.targets_shape = targets.shape[1:]
        whole = targets.dtype.kind != "f"
        self.targets_dtype = np.dtype(np.int32 if whole else np.float32)
        if whole:
            check_int32(targets, "combined")
        self._name(classes)

    def _name(self, classes):
        """Call the labels that the targets are by these names, where there are any."""
        if classes is None:
            return
        if self.targets_dtype.kind != "i":
            raise UserError(
                "combined: classes are for targets that are labels: whole numbers, or images with "
                "pixel_labels=True"
            )
        self.classes = [str(name) for name in classes]

    def __len__(self):
        return len(self.images)

    def read(self, indices):
        return self.images.read(indices)

    def targets(self, indices):
        if not isinstance(self.of, Datastore):
            return self.of[np.asarray(indices, np.int64)].astype(self.targets_dtype, copy=False)
        found = read_images(self.of, indices)
        if self.scaled:  # as the images of a mini-batch are
            return found / np.float32(255)
        return found.reshape(len(found), *self.targets_shape).astype(self.targets_dtype, copy=False)

    def name(self, i):
        return self.images.name(i)

    def located(self, i):
        return self.images.located(i)

    def describe(self):
        return f"{self.images.describe().rpartition(': ')[0] or 'combined'}: {counted(self)}"

    def fingerprint(self):
        of = self.of.fingerprint() if isinstance(self.of, Datastore) else self.of
        return digest(self.images.fingerprint(), of, self.targets_shape, self.targets_dtype.str)


def _codes(targets):
    """(H, W) of a set whose pixels are labels: bytes, in one channel."""
    if targets.dtype != np.uint8 or targets.image_shape[0] != 1:
        raise UserError(
            f"{targets.describe()}: expected gray images of bytes as pixel labels, found "
            f"{targets.dtype} in {targets.image_shape[0]} channel(s)"
        )
    return targets.image_shape[1:]


def combined(images, targets, *, pixel_labels=False, classes=None):
    """A datastore whose image i is that of `images` and whose target i is that of `targets`.

    targets: a datastore, whose images are then the targets, pixels divided by 255 as those of a
    mini-batch are, floats as they are; or an array (n, ...) of floats (regression) or whole
    numbers. pixel_labels: the targets are gray images whose pixels are labels, as whole numbers
    (H, W). classes: the names of such labels, from label 0 on, as a confusion matrix has them.
    UserError where there are not as many of both.
    """
    targets = targets if isinstance(targets, Datastore) else np.asarray(targets)
    return Combined(images, targets, pixel_labels, classes)


class Transformed(Datastore):
    """Another set with a function applied to each image. See `Datastore.transform`."""

    def __init__(self, parent, function, include_index=False, image_shape=None, dtype=None):
        self.parent, self.function, self.include_index = parent, function, include_index
        self.labels, self.classes = parent.labels, parent.classes
        self.targets_shape, self.targets_dtype = parent.targets_shape, parent.targets_dtype
        if image_shape is None or dtype is None:
            if not len(parent):
                raise UserError(
                    f"{parent.describe()}: expected images to find the shape of what transform "
                    "makes of them, found none; give image_shape and dtype"
                )
            first = self._applied(parent.read([0])[0], 0)
            image_shape, dtype = first.shape, first.dtype
        self.image_shape = tuple(int(size) for size in image_shape)
        self.dtype = np.dtype(np.uint8 if np.dtype(dtype) == np.uint8 else np.float32)

    def __len__(self):
        return len(self.parent)

    def _applied(self, image, i):
        found = np.asarray(self.function(image, i) if self.include_index else self.function(image))
        if found.ndim != 3 or not (found.dtype == np.uint8 or found.dtype.kind == "f"):
            raise UserError(
                f"{self.located(i)}: expected transform to return uint8 or floats (C, H, W), got "
                f"{found.dtype} of shape {found.shape}"
            )
        return found

    def read(self, indices):
        images = np.empty((len(indices), *self.image_shape), self.dtype)
        # One image at a time: how many are read together depends on the number of ranks.
        for place, before, i in zip(images, self.parent.read(indices), indices, strict=True):
            found = self._applied(before, int(i))
            if found.shape != place.shape or (found.dtype == np.uint8) != (self.dtype == np.uint8):
                raise UserError(
                    f"{self.located(int(i))}: expected transform to return {self.dtype} of shape "
                    f"{place.shape} as for image 0, got {found.dtype} of shape {found.shape}"
                )
            place[...] = found
        return images

    def targets(self, indices):
        return self.parent.targets(indices)

    def name(self, i):
        return self.parent.name(i)

    def located(self, i):
        return self.parent.located(i)

    def describe(self):
        return made_of(self.parent, "transformed", self)

    def fingerprint(self):
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return digest(self.parent.fingerprint(), name, self.image_shape, self.dtype.str)
