"""What a set of images is to the rest of the library, and the simplest one: arrays in memory."""

import os
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np

from mpidl import keyed
from mpidl.errors import UserError
from mpidl.files import digest
from mpidl.text import printable

MOST_CLASSES = 1 << 20  # where no names say how many there are
NAMED = 3  # of the classes that a warning is of


class Datastore:
    """Images that are read by index, with their labels or targets.

    image_shape: (C, H, W) of every image. dtype: what `read` returns, uint8 (pixels 0..255) or
    float32. classes: names, by label. labels: int64 (n,), or None where they are not known.
    targets_shape: of the array that each image is to be mapped to (another image, a label a pixel,
    numbers), None where there is none; targets_dtype: float32, or int32. A mini-batch has the
    targets where a set has them, else the labels.
    preprocess: the `Preprocess` that images come through (of several the last), which a network
    trained on them keeps, so that it can be shown raw ones; None where there is none.
    in_memory: whether reading costs no more than a copy, so that no cache is of use.

    A set of one's own derives from this class and sets image_shape. With labels it sets them and
    classes, and defines `read`. With targets it sets targets_shape and defines three methods:
    `__len__`, `read`, and `targets`.
    """

    image_shape: tuple[int, int, int]
    classes: list[str] = []
    labels: np.ndarray | None = None
    targets_shape: tuple[int, ...] | None = None
    dtype = np.dtype(np.uint8)
    targets_dtype = np.dtype(np.float32)
    preprocess: Any = None
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

    def targets(self, indices):
        """The targets of these images, (len(indices), *targets_shape) of `targets_dtype`.

        Called as `read` is.
        """
        raise TypeError(f"{type(self).__name__} must define targets(indices)")

    def name(self, i):
        """What to call image i in a table: its path, or "image 17"."""
        return f"image {i}"

    def located(self, i):
        """What to call image i in a message: `name`, after the file where that is not said."""
        return self.name(i)

    def describe(self):
        """One line for the console."""
        return f"{type(self).__name__}: {counted(self)}"

    def fingerprint(self):
        """A hex digest of names, labels, shapes and sizes: the same set, wherever it lies.

        It is cheap and decodes nothing. It tells another set from this one, not a changed pixel.
        """
        parts = [len(self), self.image_shape, self.dtype.str, *self.classes, self.labels]
        if self.targets_shape is not None:
            parts += ["targets", self.targets_shape, self.targets_dtype.str]
        return digest(*parts)

    def subset(self, indices):
        """These images, in this order, as a datastore."""
        return Subset(self, indices)

    def transform(self, function, *, include_index=False, image_shape=None, dtype=None):
        """This set with `function` applied to each image, as a datastore.

        function: of one image (C, H, W), uint8 or float32 as this set has it, and with
        include_index of its index too, by which random numbers are to be keyed; it returns
        (C, H, W), uint8 (pixels 0..255) or float. It sees one image at a time, and is called by the
        prefetch thread, once for each image where the results are kept. image_shape and dtype of
        its results are found out on image 0 where they are not given.
        """
        from mpidl.data.combined import Transformed

        return Transformed(self, function, include_index, image_shape, dtype)

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
        with np.errstate(over="ignore"):  # an infinity is told of when it is read
            floats = images.dtype != np.uint8
            self.images = images.astype(np.float32, copy=False) if floats else images
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

    def located(self, i):
        return f"{self.source}: {self.name(i)}"

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
        self.targets_shape, self.targets_dtype = datastore.targets_shape, datastore.targets_dtype
        self.classes, self.in_memory = datastore.classes, datastore.in_memory
        self.preprocess = datastore.preprocess
        self.labels = None if datastore.labels is None else datastore.labels[indices]

    def __len__(self):
        return len(self.indices)

    def read(self, indices):
        return self.parent.read(self.indices[np.asarray(indices, np.int64)])

    def targets(self, indices):
        return self.parent.targets(self.indices[np.asarray(indices, np.int64)])

    def name(self, i):
        return self.parent.name(int(self.indices[i]))

    def located(self, i):
        return self.parent.located(int(self.indices[i]))

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
        found = labels.min() if labels.dtype.kind == "i" else labels.dtype
        raise UserError(f"{source}: expected whole numbers from 0 as labels, got {found}")
    if classes is not None and count and labels.max() >= len(classes):
        raise UserError(
            f"{source}: expected labels below {len(classes)}, the number of classes (they count "
            f"from 0), got {labels.max()}"
        )
    if classes is None and count and labels.max() >= MOST_CLASSES:
        raise UserError(f"{source}: expected labels below {MOST_CLASSES}, got {labels.max()}")
    return labels.astype(np.int64)


def check_classes(datastore):
    """A UserError where these images cannot train a classifier: no labels, or all the same."""
    if datastore.labels is None:
        raise UserError(
            f"{datastore.describe()}: expected labels to train a classifier, found none"
        )
    found = np.unique(datastore.labels)
    if len(found) == 1:
        only = datastore.classes[found[0]] if len(datastore.classes) > found[0] else found[0]
        raise UserError(
            f"{datastore.describe()}: expected images of two classes at least to train a "
            f"classifier, found those of one ({printable(str(only))})"
        )


def without_images(datastore):
    """A line that warns of classes which no image has; None where all have some, or where images
    are not labelled."""
    if datastore.labels is None or datastore.targets_shape is not None:
        return None
    classes = datastore.classes
    bare = np.setdiff1d(np.arange(len(classes)), datastore.labels)
    if not len(bare):
        return None
    named = ", ".join(printable(classes[i]) for i in bare[:NAMED])
    more = f" and {len(bare) - NAMED} more" if len(bare) > NAMED else ""
    line = (
        f"warning: {datastore.describe()}: no image of class{'es' if len(bare) > 1 else ''} "
        f"{named}{more} (of {len(classes)})"
    )
    numbers = bare[0] == 0 and list(classes) == [str(i) for i in range(len(classes))]
    return line + ": labels count from 0" * bool(numbers)


def read_images(datastore, indices):
    """`datastore.read(indices)` as its `dtype`, checked: the shape, and no NaN or infinity."""
    images = np.asarray(datastore.read(indices))
    expected = (len(indices), *datastore.image_shape)
    right = images.dtype == np.uint8 if datastore.dtype == np.uint8 else images.dtype.kind == "f"
    if images.shape != expected or not right:
        raise UserError(
            f"{type(datastore).__name__}.read: expected {datastore.dtype} of shape {expected}, got "
            f"{images.dtype} of shape {images.shape}"
        )
    images = images.astype(datastore.dtype, copy=False)
    check_finite(images, datastore, indices, "pixels")
    return images


def read_targets(datastore, indices):
    """`datastore.targets(indices)` as `targets_dtype`, checked as `read_images` does."""
    values = np.asarray(datastore.targets(indices))
    expected = (len(indices), *datastore.targets_shape)
    whole = datastore.targets_dtype.kind in "iu"
    if values.shape != expected or values.dtype.kind not in ("iub" if whole else "f"):
        raise UserError(
            f"{type(datastore).__name__}.targets: expected {datastore.targets_dtype} of shape "
            f"{expected}, got {values.dtype} of shape {values.shape}"
        )
    values = values.astype(datastore.targets_dtype, copy=False)
    check_finite(values, datastore, indices, "targets")
    return values


def check_finite(values, datastore, indices, what):
    """A UserError that names the first of these images with a NaN or an infinity in `values`."""
    if values.dtype.kind != "f":
        return
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):  # much faster, and a large sum may be infinite
            return
    for i, value in zip(indices, values, strict=True):
        bad = value[~np.isfinite(value)]
        if bad.size:
            raise UserError(
                f"{datastore.located(int(i))}: expected finite {what}, found {bad.flat[0]} "
                f"({bad.size} of {value.size})"
            )


def check_below(classes, labels, datastore, indices):
    """A UserError that names the first of these images with a label that is no class's number."""
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        rows = labels.reshape(len(labels), -1)
        bad = (rows < 0) | (rows >= classes)
        i = int(np.argmax(bad.any(axis=1)))
        raise UserError(
            f"{datastore.located(int(indices[i]))}: expected labels from 0 to {classes - 1}, found "
            f"{rows[i][bad[i]][0]}"
        )


def counted(datastore):
    """ "60000 images of 1x28x28 in 10 classes", "60 images of 1x28x28 with targets of 1x28x28"."""
    text = f"{len(datastore)} images of {'x'.join(map(str, datastore.image_shape))}"
    if datastore.targets_shape is not None:
        sizes = "x".join(map(str, datastore.targets_shape))
        text += f" with targets of {sizes}" if sizes else " with a number each"
    elif datastore.labels is not None:
        text += f" in {len(datastore.classes)} classes"
    return text


def made_of(datastore, how, made):
    """The line of a set that was made of another: where that lies, how, and the new counts."""
    where = datastore.describe().rpartition(": ")[0]
    return f"{where or 'images'}, {how}: {counted(made)}"


def need_datastore(found, called):
    """A UserError where this is none, which says what makes one."""
    if isinstance(found, Datastore):
        return
    hint = ""
    if isinstance(found, str | os.PathLike):
        hint = ": dl.ImageFolder(folder) makes one"
    elif isinstance(found, tuple | list | np.ndarray):
        hint = ": dl.ArrayDatastore(images, labels) makes one"
    raise UserError(f"{called}: expected a datastore, found {type(found).__name__}{hint}")
