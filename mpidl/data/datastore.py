"""What a set of images is to the rest of the library, and the simplest one: arrays in memory."""

import hashlib
import os
from decimal import ROUND_HALF_UP, Decimal

import numpy as np

from mpidl import keyed
from mpidl.errors import UserError


class Datastore:
    """Images that are read by index, with their labels.

    image_shape: (C, H, W) of every image. classes: names, by label. labels: int64 (n,), or None
    where they are not known. dtype: what `read` returns, uint8 (pixels 0..255) or float32.
    in_memory: whether reading costs no more than a copy, so that no cache is of use.

    A set of one's own derives from this class, sets these five and defines `read`; a set without
    labels defines `__len__` too.
    """

    image_shape: tuple[int, int, int]
    classes: list[str] = []
    labels: np.ndarray | None = None
    dtype = np.dtype(np.uint8)
    in_memory = False

    def __len__(self):
        if self.labels is None:
            raise TypeError(f"{type(self).__name__} has no labels, so it must define __len__")
        return len(self.labels)

    def read(self, indices):
        """The images of these indices, (len(indices), C, H, W) of `dtype`.

        Called by the prefetch thread: it makes no MPI calls.
        """
        raise TypeError(f"{type(self).__name__} must define read(indices)")

    def name(self, i):
        """What to call image i in a message or a table: its path, or "image 17"."""
        return f"image {i}"

    def describe(self):
        """One line for the console."""
        return f"{type(self).__name__}: {counted(self)}"

    def fingerprint(self):
        """A hex digest of names, labels, shapes and sizes: the same set, wherever it lies.

        It is cheap and decodes nothing. It tells another set from this one, not a changed pixel.
        """
        return digest(len(self), self.image_shape, self.dtype.str, *self.classes, self.labels)

    def subset(self, indices):
        """These images, in this order, as a datastore."""
        return Subset(self, indices)

    def split(self, fraction, seed=0):
        """(first, second): of each label, `fraction` of its images at random and the others.

        A label's count is rounded half up; which images is a matter of the seed alone. Both parts
        keep the images in the order they have here. Without labels all images count as one label.
        """
        if not 0 <= fraction <= 1:
            raise UserError(f"a split's fraction must be between 0 and 1, got {fraction}")
        labels = np.zeros(len(self), np.int64) if self.labels is None else self.labels
        first = np.zeros(len(self), bool)
        for label in np.unique(labels):
            (members,) = np.nonzero(labels == label)
            # In decimal, as the user wrote it: 0.29 * 50 is 14.5, and 14.499999999999998 in binary.
            exact = Decimal(str(float(fraction))) * len(members)
            count = int(exact.to_integral_value(ROUND_HALF_UP))
            order = keyed.permutation(len(members), seed, f"split {label}")
            first[members[order[:count]]] = True
        return self.subset(np.nonzero(first)[0]), self.subset(np.nonzero(~first)[0])


class ArrayDatastore(Datastore):
    """Images that lie in memory.

    images: (n, C, H, W), or (n, H, W) for gray ones; uint8 pixels, or floats, which are kept as
    float32 and reach the network unchanged. labels: (n,) whole numbers from 0, or None.
    classes: names by label; "0", "1", ... where not given.
    """

    in_memory = True

    def __init__(self, images, labels=None, classes=None, source="arrays"):
        images = np.asarray(images)
        images = images[:, None] if images.ndim == 3 else images
        if images.ndim != 4 or not (images.dtype == np.uint8 or images.dtype.kind == "f"):
            raise UserError(
                f"{source}: expected uint8 or float images of shape (n, C, H, W) or (n, H, W), "
                f"got {images.dtype} of shape {images.shape}"
            )
        self.images = images if images.dtype == np.uint8 else images.astype(np.float32, copy=False)
        self.image_shape = tuple(int(size) for size in images.shape[1:])
        self.dtype = self.images.dtype
        self.source = source
        self.classes = [] if classes is None else [str(name) for name in classes]
        if labels is not None:
            labels = checked_labels(labels, len(images), classes, source)
            self.labels = labels
            if classes is None:
                self.classes = [str(i) for i in range(int(labels.max(initial=-1)) + 1)]

    def __len__(self):
        return len(self.images)

    def read(self, indices):
        return self.images[np.asarray(indices, np.int64)]

    def describe(self):
        return f"{self.source}: {counted(self)}"

    def fingerprint(self):
        # A few images from first to last tell two sets of the same sizes apart.
        some = np.linspace(0, max(len(self) - 1, 0), min(len(self), 64)).astype(np.int64)
        return digest(super().fingerprint(), self.images[some])


class Subset(Datastore):
    """Some images of another datastore, in a given order."""

    parent: Datastore

    def __init__(self, datastore, indices):
        indices = np.asarray(indices, np.int64).reshape(-1)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(datastore):
            raise IndexError(
                f"expected indices from 0 to {len(datastore) - 1}, "
                f"got {indices.min()} to {indices.max()}"
            )
        if isinstance(datastore, Subset):
            datastore, indices = datastore.parent, datastore.indices[indices]
        self.parent, self.indices = datastore, indices
        self.image_shape, self.dtype = datastore.image_shape, datastore.dtype
        self.classes, self.in_memory = datastore.classes, datastore.in_memory
        self.labels = None if datastore.labels is None else datastore.labels[indices]

    def __len__(self):
        return len(self.indices)

    def read(self, indices):
        return self.parent.read(self.indices[np.asarray(indices, np.int64)])

    def name(self, i):
        return self.parent.name(int(self.indices[i]))

    def describe(self):
        return f"{len(self)} of {self.parent.describe()}"

    def fingerprint(self):
        return digest(self.parent.fingerprint(), self.indices)


def checked_labels(labels, count, classes, source):
    """`labels` as int64 (count,); a UserError where they are not whole numbers of known classes."""
    labels = np.asarray(labels)
    if labels.shape != (count,):
        raise UserError(
            f"{source}: expected one label an image, ({count},), got labels of shape {labels.shape}"
        )
    if count and (labels.dtype.kind not in "iu" or labels.min() < 0):
        raise UserError(f"{source}: expected whole numbers from 0 as labels, got {labels.dtype}")
    if classes is not None and count and labels.max() >= len(classes):
        raise UserError(
            f"{source}: expected labels below {len(classes)}, the number of classes, "
            f"got {labels.max()}"
        )
    return labels.astype(np.int64)


def counted(datastore):
    """ "60000 images of 1x28x28 in 10 classes"."""
    sizes = "x".join(str(size) for size in datastore.image_shape)
    known = f" in {len(datastore.classes)} classes" if datastore.labels is not None else ""
    return f"{len(datastore)} images of {sizes}{known}"


def digest(*parts):
    """SHA-256 in hex of texts, numbers, tuples and arrays; each part is told from the next."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            little = part.astype(part.dtype.newbyteorder("<"), copy=False)
            data = f"{little.dtype.str}{part.shape}".encode() + little.tobytes()
        else:
            data = str(part).encode("utf-8", "surrogateescape")
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


def shown(path):
    """A path as text that any terminal can print: bytes that are no UTF-8 as \\xNN."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def on_rank_0(world, function):
    """function()'s result on all ranks, computed on rank 0 alone; its UserError on all ranks.

    Collective. One rank asks the file system; a thousand would bring it down.
    """
    if world is None:
        return function()
    result = error = None
    if world.rank == 0:
        try:
            result = function()
        except UserError as e:
            error = e
    world.together(error)
    return world.broadcast(result)
