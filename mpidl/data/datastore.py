"""The base class of image sets, and sets derived from other sets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, overload

import numpy as np

from mpidl.data import splitting
from mpidl.errors import UserError
from mpidl.files import digest
from mpidl.text import class_names

if TYPE_CHECKING:
    from mpidl.data.transforms.preprocess import Preprocess

Indices: TypeAlias = Sequence[int] | np.ndarray


class Datastore:
    """Base class of image sets, which return images by index, with labels or targets.

    Every subclass sets `image_shape` and defines `read`. A set with labels also sets `labels` and
    `classes`. A set with targets also sets `targets_shape` and defines `__len__` and `targets`.
    A mini-batch holds the targets if the set has targets, and the labels otherwise. Prefetch
    threads call `read` and `targets`.

    Attributes
    ----------
    image_shape : tuple of int
        (C, H, W) of every image.
    dtype : np.dtype
        Type of the images that `read` returns: uint8 (pixels 0..255) or float32.
    classes : list of str
        Class names; the name of label i is ``classes[i]``.
    labels : np.ndarray or None
        Labels of the images, int64 (n,), or None if the labels are unknown.
    targets_shape : tuple of int or None
        Shape of an image's target, which may be another image, a label per pixel, or one or more
        scalars. None if the set has no targets.
    targets_dtype : np.dtype
        Type of the targets, float32 or int32.
    preprocess : Preprocess or None
        The last `Preprocess` applied to the images. A network trained on this set applies the same
        `Preprocess` to raw images.
    in_memory : bool
        Whether reading an image costs no more than a copy. If so, a cache would not help.
    is_checked : bool
        Whether `read` and `targets` check the shape, the type and the values of their results.
    """

    image_shape: tuple[int, ...]
    classes: list[str] = []
    labels: np.ndarray | None = None
    targets_shape: tuple[int, ...] | None = None
    dtype: np.dtype = np.dtype(np.uint8)
    targets_dtype: np.dtype = np.dtype(np.float32)
    preprocess: Preprocess | None = None
    in_memory: bool = False
    is_checked: bool = False

    def __len__(self) -> int:
        if self.labels is None:
            raise TypeError(f"{type(self).__name__} has no labels, so it must define __len__")
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int | np.ndarray | None]:
        """Return image i with its label or target.

        Parameters
        ----------
        i : int
            Index of an image. Negative indices count from the end.

        Returns
        -------
        image : ndarray
            Image (C, H, W) of `dtype`.
        label : int, ndarray or None
            The target if the set has targets, otherwise the label, or None if there are no labels.

        Raises
        ------
        IndexError
            If there is no image i.
        TypeError
            If `i` is not a single index.
        """
        kind = type(self).__name__
        try:
            i, count = operator.index(i), len(self)
        except TypeError:
            raise TypeError(
                f"{kind}: expected the index of one image, found {i!r:.100}; subset(indices) "
                "selects several images"
            ) from None
        if not -count <= i < count:
            raise IndexError(f"{kind}: expected an index below {count}, the images, found {i}")
        i %= count
        image = self.read([i])[0]
        if self.targets_shape is not None:
            return image, self.targets([i])[0]
        return image, None if self.labels is None else int(self.labels[i])

    def __iter__(self) -> Iterator[tuple[np.ndarray, int | np.ndarray | None]]:
        """Yield (image, label) of each image in order; see `__getitem__`."""
        return (self[i] for i in range(len(self)))

    def read(self, indices: Indices) -> np.ndarray:
        """Return images (len(indices), C, H, W) of `dtype`. Must not call MPI.

        Parameters
        ----------
        indices : sequence of int
            Indices of images, in any order.

        Returns
        -------
        ndarray
            The images.
        """
        raise TypeError(f"{type(self).__name__} must define read(indices)")

    def targets(self, indices: Indices) -> np.ndarray:
        """Return the targets (len(indices), *targets_shape) of images. Must not call MPI.

        Parameters
        ----------
        indices : sequence of int
            As in `read`.

        Returns
        -------
        ndarray
            The targets.
        """
        raise TypeError(f"{type(self).__name__} must define targets(indices)")

    def array(self) -> np.ndarray | None:
        """Return all images as one array in memory, or None.

        Returns
        -------
        ndarray or None
            Images (n, C, H, W) of the set's `dtype`. None if the images are not in one array.
        """
        return None

    def read_ahead(self, indices: Indices) -> object:
        """Request images and targets that will be read soon. Must not call MPI.

        A set in an object store starts the requests and returns immediately. Other sets do nothing.

        Parameters
        ----------
        indices : sequence of int
            As in `read`.

        Returns
        -------
        object
            A handle that the caller keeps until it has read the images. Deleting the handle cancels
            the requests.
        """
        return None

    def encoded_sizes(self) -> np.ndarray | None:
        """Return the sizes in bytes of the image files of this set.

        Returns
        -------
        ndarray or None
            Sizes (n,), int64. None unless every image of this set is an unmodified image file.
        """
        return None

    def read_encoded(self, indices: Indices) -> list[bytes]:
        """Return the encoded content (such as JPEG) of image files by index. Must not call MPI.

        Parameters
        ----------
        indices : sequence of int
            As in `read`.

        Returns
        -------
        list of bytes
            The contents. Only available if `encoded_sizes` does not return None.
        """
        raise TypeError(f"{type(self).__name__} has no image files")

    def name(self, i: int) -> str:
        """Return the name that tables show for image i: its path, or a text such as "image 17".

        Parameters
        ----------
        i : int
            Index of an image.

        Returns
        -------
        str
            The name.
        """
        return f"image {i}"

    def located(self, i: int) -> str:
        """Return the name of image i for messages.

        Subclasses prepend the name of the file or data set if `name` does not contain it.

        Parameters
        ----------
        i : int
            Index of an image.

        Returns
        -------
        str
            The name.
        """
        return self.name(i)

    def describe(self) -> str:
        """Describe the set in one line for the console.

        Returns
        -------
        str
            A description such as "900 of flowers: 1000 images of 3x64x64 in 5 classes".
        """
        return f"{type(self).__name__}: {counted(self)}"

    def __repr__(self) -> str:
        kind = type(self).__name__
        try:
            return f"{kind}({self.describe().removeprefix(f'{kind}: ')})"
        except Exception:  # a debugger may show an object whose __init__ has not finished
            return object.__repr__(self)

    def fingerprint(self) -> str:
        """Return a hex digest of the set's class names, labels, shapes and size.

        The digest does not depend on where the set is stored. No image is decoded, so the digest is
        cheap to compute, but it does not detect a changed pixel.

        Returns
        -------
        str
            Hexadecimal digits.
        """
        parts = [len(self), self.image_shape, self.dtype.str, *self.classes, self.labels]
        if self.targets_shape is not None:
            parts += ["targets", self.targets_shape, self.targets_dtype.str]
        return digest(*parts)

    def subset(self, indices: Indices) -> Subset:
        """Return a datastore of the images with the given indices, in the given order.

        Parameters
        ----------
        indices : sequence of int
            Indices of images, in the new order. An index may occur several times.

        Returns
        -------
        Datastore
            The selected images, which are read from this datastore.
        """
        return Subset(self, indices)

    def transform(
        self,
        function: Callable[..., np.ndarray],
        *,
        include_index: bool = False,
        image_shape: tuple[int, ...] | None = None,
        dtype: np.dtype | type | None = None,
    ) -> Transformed:
        """Return a datastore that applies a function to each image of this datastore.

        Prefetch threads call the function on one image at a time. If the results are cached, the
        function is called once for each cached image.

        Parameters
        ----------
        function : callable
            ``function(image)`` receives one image (C, H, W) of this datastore's `dtype`. It returns
            (C, H, W), uint8 (pixels 0..255) or float.
        include_index : bool
            Whether to call ``function(image, index)`` instead. A function that uses random numbers
            must derive them from the index.
        image_shape, dtype
            Shape and type of the function's results. If either is None, image 0 is transformed to
            determine both.

        Returns
        -------
        Datastore
            The transformed images. Each image is transformed when it is read.
        """
        return Transformed(self, function, include_index, image_shape, dtype)

    @overload
    def split(self, part: float, /, *, seed: int = 0) -> tuple[Subset, Subset]: ...
    @overload
    def split(self, *parts: float, seed: int = 0) -> tuple[Subset, ...]: ...
    def split(self, *parts: float, seed: int = 0) -> tuple[Subset, ...]:
        """Split the set at random into subsets with the same mix of labels.

        All subsets keep the order of this set. If the set has no labels, all images are treated as
        having the same label.

        Parameters
        ----------
        *parts : float or int
            Size of each subset except the last, which receives the remaining images. Floats are
            fractions of each label's images, 0 to 1: ``split(0.8, 0.1)`` gives 80, 10 and 10
            percent. Integers are numbers of images per label: ``split(100)`` takes 100 images of
            each label. For each label, the running totals of the sizes are rounded to the nearest
            integer, and halves are rounded up.
        seed : int
            Seed of the random selection. Equal seeds select the same images. The first subset does
            not depend on the sizes of the other subsets.

        Returns
        -------
        tuple of Subset
            The subsets, ``len(parts) + 1`` in total.

        Raises
        ------
        UserError
            If the fractions are not between 0 and 1 or add up to more than 1, or if a label has
            fewer images than the integers add up to.

        Examples
        --------
        >>> train, test = images.split(0.9)
        >>> train, validation, test = images.split(0.8, 0.1, seed=1)
        >>> few, rest = images.split(20)
        """
        classes = None if self.labels is None else self.classes
        selections = splitting.select(self._strata(), parts, seed, classes, self.describe())
        return tuple(self.subset(indices) for indices in selections)

    def kfold(self, count: int, *, seed: int = 0) -> list[tuple[Subset, Subset]]:
        """Divide the set at random into cross-validation folds with the same mix of labels.

        Each image is in one fold. For each label, the numbers of images in any two folds differ by
        at most 1. The sizes of any two folds also differ by at most 1. If the set has no labels,
        all images are treated as having the same label.

        Parameters
        ----------
        count : int
            Number of folds, at least 2.
        seed : int
            Seed of the random selection. Equal seeds select the same images.

        Returns
        -------
        list of (Subset, Subset)
            For each fold, the training images (from all other folds) and the validation images
            (from the fold itself). Both subsets keep the order of this set.

        Raises
        ------
        UserError
            If `count` is below 2 or above the number of images.

        Examples
        --------
        >>> for train, validation in images.kfold(5):
        ...     options = dl.TrainingOptions(validation=validation)
        ...     result = dl.train(new_network(), train, options)
        """
        if not 2 <= count <= len(self):
            raise UserError(
                f"{self.describe()}: kfold: expected 2 to {len(self)} folds, the number of "
                f"images, got {count}"
            )
        numbers = splitting.fold_numbers(self._strata(), count, seed)
        halves = [
            [np.nonzero(mask)[0] for mask in (numbers != k, numbers == k)] for k in range(count)
        ]
        return [(self.subset(train), self.subset(validation)) for train, validation in halves]

    def _strata(self):
        """Return the label of each image; 0 if the images have no labels."""
        return np.zeros(len(self), np.int64) if self.labels is None else self.labels

    def class_counts(self) -> dict[str, int]:
        """Count the images of each class.

        Returns
        -------
        dict
            {class name: number of images} in the order of the labels, including classes without
            images. Classes with the same name are counted together.

        Raises
        ------
        UserError
            If the set has no labels.
        """
        if self.labels is None:
            raise UserError(f"{self.describe()}: expected images with labels to count, found none")
        counts = np.bincount(self.labels, minlength=len(self.classes))
        names = class_names(self.classes, len(counts))
        totals = dict.fromkeys(names, 0)
        for name, count in zip(names, counts, strict=True):
            totals[name] += int(count)
        return totals


class Derived(Datastore):
    """Base class of sets that read from a parent set.

    The shapes, types, labels and classes are copied from the parent. `encoded_sizes` and
    `read_encoded` are not forwarded, because the images may differ from the parent's image files.
    """

    def __init__(self, parent: Datastore):
        self.parent = parent
        self.image_shape, self.dtype = parent.image_shape, np.dtype(parent.dtype)
        self.labels, self.classes = parent.labels, parent.classes
        self.targets_shape = parent.targets_shape
        if parent.targets_dtype is not None:
            self.targets_dtype = np.dtype(parent.targets_dtype)

    def _parent_indices(self, indices: Indices) -> Indices:
        """Return the indices in the parent of images of this set."""
        return indices

    def __len__(self) -> int:
        return len(self.parent)

    def read(self, indices: Indices) -> np.ndarray:
        return self.parent.read(self._parent_indices(indices))

    def targets(self, indices: Indices) -> np.ndarray:
        return self.parent.targets(self._parent_indices(indices))

    def read_ahead(self, indices: Indices) -> object:
        return self.parent.read_ahead(self._parent_indices(indices))

    def name(self, i: int) -> str:
        return self.parent.name(int(self._parent_indices([i])[0]))

    def located(self, i: int) -> str:
        return self.parent.located(int(self._parent_indices([i])[0]))

    def describe(self) -> str:
        return self.parent.describe()

    def fingerprint(self) -> str:
        return self.parent.fingerprint()


class Subset(Derived):
    """A datastore of images selected from another datastore by index; see `Datastore.subset`."""

    def __init__(self, datastore: Datastore, indices: Indices):
        super().__init__(datastore)
        selected = np.asarray(indices, np.int64).reshape(-1)
        if len(selected) and not 0 <= selected.min() <= selected.max() < len(datastore):
            raise IndexError(
                f"expected indices from 0 to {len(datastore) - 1}, "
                f"got {selected.min()} to {selected.max()}"
            )
        if datastore.labels is not None:
            self.labels = datastore.labels[selected]
        self.indices: np.ndarray = selected
        if isinstance(datastore, Subset):
            self.parent, self.indices = datastore.parent, datastore.indices[selected]
        self.in_memory, self.preprocess = datastore.in_memory, datastore.preprocess

    def _parent_indices(self, indices: Indices) -> Indices:
        return self.indices[np.asarray(indices, np.int64)]

    def __len__(self) -> int:
        return len(self.indices)

    def encoded_sizes(self) -> np.ndarray | None:
        sizes = self.parent.encoded_sizes()
        return None if sizes is None else sizes[self.indices]

    def read_encoded(self, indices: Indices) -> list[bytes]:
        return self.parent.read_encoded(self._parent_indices(indices))

    def describe(self) -> str:
        return f"{len(self)} of {self.parent.describe()}"

    def fingerprint(self) -> str:
        return digest(self.parent.fingerprint(), self.indices)


class Transformed(Derived):
    """A datastore with a function applied to each image; see `Datastore.transform`."""

    def __init__(
        self,
        parent: Datastore,
        function: Callable[..., np.ndarray],
        include_index: bool = False,
        image_shape: tuple[int, ...] | None = None,
        dtype: np.dtype | type | None = None,
    ):
        super().__init__(parent)
        self.function, self.include_index = function, include_index
        if image_shape is None or dtype is None:
            if not len(parent):
                raise UserError(
                    f"{parent.describe()}: expected an image to determine the transformed shape, "
                    "found none; pass image_shape and dtype"
                )
            first = self._apply(parent.read([0])[0], 0)
            image_shape, dtype = first.shape, first.dtype
        self.image_shape = tuple(int(size) for size in image_shape)
        self.dtype = np.dtype(np.uint8 if np.dtype(dtype) == np.uint8 else np.float32)

    def _apply(self, image, i):
        """Apply the function to image i and check the shape and type of its result."""
        output = np.asarray(self.function(image, i) if self.include_index else self.function(image))
        if output.ndim != 3 or not (output.dtype == np.uint8 or output.dtype.kind == "f"):
            raise UserError(
                f"{self.located(i)}: expected transform to return uint8 or floats (C, H, W), got "
                f"{output.dtype} of shape {output.shape}"
            )
        return output

    def read(self, indices: Indices) -> np.ndarray:
        outputs = np.empty((len(indices), *self.image_shape), self.dtype)
        # Transform one image at a time: results must not depend on how many images a rank reads.
        for slot, image, i in zip(outputs, self.parent.read(indices), indices, strict=True):
            output = self._apply(image, int(i))
            if output.shape != slot.shape or (output.dtype == np.uint8) != (self.dtype == np.uint8):
                raise UserError(
                    f"{self.located(int(i))}: expected transform to return {self.dtype} of shape "
                    f"{slot.shape} as for image 0, got {output.dtype} of shape {output.shape}"
                )
            slot[...] = output
        return outputs

    def describe(self) -> str:
        return describe_derived(self.parent, "transformed", self)

    def fingerprint(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return digest(self.parent.fingerprint(), name, self.image_shape, self.dtype.str)


def counted(datastore: Datastore) -> str:
    """Return the size of a set in words.

    Two examples are "60000 images of 1x28x28 in 10 classes" and
    "60 images of 1x28x28 with targets of 1x28x28".
    """
    text = f"{len(datastore)} images of {'x'.join(map(str, datastore.image_shape))}"
    if datastore.targets_shape is not None:
        sizes = "x".join(map(str, datastore.targets_shape))
        text += f" with targets of {sizes}" if sizes else " with one target each"
    elif datastore.labels is not None:
        text += f" in {len(datastore.classes)} classes"
    return text


def describe_derived(parent: Datastore, operation: object, derived: Datastore) -> str:
    """Describe a derived set in one line: the parent's source, the operation and the new size."""
    source = parent.describe().rpartition(": ")[0]
    return f"{source or 'images'}, {operation}: {counted(derived)}"
