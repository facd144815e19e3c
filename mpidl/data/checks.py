"""Check the classes of image sets, and the images and targets read from the sets."""

import contextlib
from collections.abc import Iterator

import numpy as np

from mpidl.data.datastore import Datastore, Indices
from mpidl.errors import UnreadableImage, UserError
from mpidl.text import printable

MAX_NAMES = 3  # maximum number of class names in a warning
ADVICE = (
    "to leave out such images, use --on-bad-image skip (in Python, "
    'TrainingOptions(on_bad_image="skip"))'
)


def check_classes(datastore: Datastore) -> None:
    """Raise `UserError` if a set has no labels, or if all images have the same class."""
    if datastore.labels is None:
        raise UserError(
            f"{datastore.describe()}: expected labels to train a classifier, found none"
        )
    labels = np.unique(datastore.labels)
    if len(labels) == 1:
        only = datastore.classes[labels[0]] if len(datastore.classes) > labels[0] else labels[0]
        raise UserError(
            f"{datastore.describe()}: expected images of at least two classes to train a "
            f"classifier, found only one ({printable(str(only))})"
        )


def empty_classes_warning(datastore: Datastore) -> str | None:
    """Return a warning that names the classes without images.

    None if every class has an image, if the set has no labels, or if the set has targets.
    """
    if datastore.labels is None or datastore.targets_shape is not None:
        return None
    classes = datastore.classes
    empty = np.setdiff1d(np.arange(len(classes)), datastore.labels)
    if not len(empty):
        return None
    names = ", ".join(printable(classes[i]) for i in empty[:MAX_NAMES])
    rest = f" and {len(empty) - MAX_NAMES} more" if len(empty) > MAX_NAMES else ""
    line = (
        f"warning: {datastore.describe()}: no image of class{'es' if len(empty) > 1 else ''} "
        f"{names}{rest} (of {len(classes)})"
    )
    numbers = empty[0] == 0 and list(classes) == [str(i) for i in range(len(classes))]
    return line + ": labels start at 0" * bool(numbers)


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Add the option that skips images to the message of an UnreadableImage in the `with` block."""
    try:
        yield
    except UnreadableImage as error:
        raise UserError(f"{error}; {ADVICE}") from None


def read_images(datastore: Datastore, indices: Indices) -> np.ndarray:
    """Read images (len(indices), C, H, W) of the datastore's `dtype` and check them.

    Raises UserError if `datastore.read` returns a wrong shape or type, or values that are NaN or
    infinite.
    """
    return _read(datastore, "read", indices, datastore.image_shape, datastore.dtype, "pixels")


def read_targets(datastore: Datastore, indices: Indices) -> np.ndarray:
    """Read targets (len(indices), *targets_shape) of the datastore's `targets_dtype` and check
    them. Raises UserError if `datastore.targets` returns a wrong shape or type, or values that are
    NaN or infinite.
    """
    shape, dtype = datastore.targets_shape, datastore.targets_dtype
    return _read(datastore, "targets", indices, shape, dtype, "targets")


def _read(datastore, method, indices, shape, dtype, noun):
    """Call a method of the datastore, check its result and convert it to `dtype`.

    `noun` names the array elements in messages.
    """
    arrays = getattr(datastore, method)(indices)
    if datastore.is_checked:
        return arrays
    arrays, dtype = np.asarray(arrays), np.dtype(dtype)
    expected, kinds = (len(indices), *shape), "iub" if dtype.kind in "iu" else "f"
    exact = method == "read" and dtype == np.uint8  # targets may have any integer type
    fits = arrays.dtype == dtype if exact else arrays.dtype.kind in kinds
    if arrays.shape != expected or not fits:
        raise UserError(
            f"{type(datastore).__name__}.{method}: expected {dtype} of shape {expected}, got "
            f"{arrays.dtype} of shape {arrays.shape}"
        )
    arrays = arrays.astype(dtype, copy=False)
    check_finite(arrays, datastore, indices, noun)
    return arrays


def check_finite(arrays: np.ndarray, datastore: Datastore, indices: Indices, kind: str) -> None:
    """Raise `UserError` for the first image whose array contains a NaN or infinity.

    `arrays` (n, ...) belong to the images with the given `indices`, and `kind` is "pixels" or
    "targets".
    """
    if arrays.dtype.kind != "f":
        return
    with np.errstate(over="ignore", invalid="ignore"):
        flat = arrays.reshape(-1)
        if np.isfinite(flat.dot(flat)):  # a fast check; the loop below decides if it overflows
            return
    for i, array in zip(indices, arrays, strict=True):
        bad = array[~np.isfinite(array)]
        if bad.size:
            raise UserError(
                f"{datastore.located(int(i))}: expected finite {kind}, found {bad.flat[0]} "
                f"({bad.size} of {array.size})"
            )


def check_below(
    classes: int,
    labels: np.ndarray,
    datastore: Datastore,
    indices: Indices,
    ignore_label: int | None = None,
) -> None:
    """Raise `UserError` for the first image with a label outside 0..classes-1.

    Labels may be floats, such as probabilities for two classes. `ignore_label` is also valid.
    """
    if labels.dtype == np.int32 and labels.flags.c_contiguous:
        is_valid = labels.view(np.uint32).max(initial=0) < classes  # negative labels become large
    else:
        is_valid = labels.size and 0 <= labels.min() <= labels.max() <= classes - 1
    if labels.size and not is_valid:
        rows = labels.reshape(len(labels), -1)
        bad = (rows < 0) | (rows > classes - 1)
        if ignore_label is not None:
            bad &= rows != ignore_label
            if not bad.any():
                return
        i = int(np.argmax(bad.any(axis=1)))
        raise UserError(
            f"{datastore.located(int(indices[i]))}: expected labels from 0 to {classes - 1}, found "
            f"{rows[i][bad[i]][0]}"
        )
