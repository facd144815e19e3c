"""Read H x W x C x N images, with labels or targets, from MATLAB .mat files (version 7.3 or 5).

A version 7.3 file is an HDF5 file and is read one mini-batch at a time. A version 5 file (save -v7
or save -v6; see `mat5`) is loaded completely, once per host. The module reads numeric arrays, and
class names stored as a cell array of character vectors. It never interprets objects, function
handles or categorical arrays.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpidl.data.array_datastore import ArrayDatastore
from mpidl.data.combined import combined
from mpidl.data.datastore import Datastore
from mpidl.data.formats import hdf5
from mpidl.data.formats.format import World, opened_by
from mpidl.data.formats.mat5 import Mat5, Variable
from mpidl.data.labels import align_labels, integer_labels, parse_class_names
from mpidl.data.loading.node_memory import once_per_node
from mpidl.data.paths import open_binary, reading, stamp_of
from mpidl.errors import UserError
from mpidl.files import on_rank_0
from mpidl.text import name_list, printable

if TYPE_CHECKING:
    import h5py

# IMAGES lists the default names of the image variable, in order of preference. For each of these
# names, LABELS lists the default names of the label variable. Case is ignored.
IMAGES = {"train": ("xtrain", "images", "x"), "test": ("xtest",)}
LABELS = {
    "xtrain": ("ytrain", "ttrain", "labelstrain"),
    "xtest": ("ytest", "ttest", "labelstest"),
    "images": ("labels", "y"),
    "x": ("y", "t", "labels"),
}
LABEL_NAMES = {name for names in LABELS.values() for name in names}
CLASSES = ("classes", "classnames", "categories", "labelnames", "label_names")
FLOATS = ("single", "double")
PIXELS = ("uint8", *FLOATS)
NUMBERS = (*FLOATS, "logical", *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)))
MAX_NAME = 4096  # maximum number of characters in a class name


class Selection(NamedTuple):
    """The variables selected for images, labels and class names, and the number of images.

    `labels` and `classes` are None if the file has no such variable.
    """

    images: Variable
    labels: Variable | None
    classes: Variable | None
    count: int


class Mat73:
    """An open version 7.3 file, with the same methods as `Mat5`."""

    def __init__(self, path: str, file: h5py.File):
        import h5py

        self.path, self.file, self.variables = path, file, list[Variable]()
        for name in file:
            link = file.get(name, getlink=True)
            if name.startswith("#") or not isinstance(link, h5py.HardLink):
                continue
            stored = file[name]
            if isinstance(stored, h5py.Dataset) and stored.shape is not None:
                kind = hdf5.attribute(stored, "MATLAB_class")
                kind = printable(kind[:40]) if isinstance(kind, bytes) else "unknown"
                shape = tuple(int(n) for n in stored.shape[::-1])
                self.variables.append(Variable(name, shape, kind))

    def numbers(self, variable: Variable) -> np.ndarray:
        """Read a numeric variable."""
        return hdf5.dataset(self.file, variable.name)[()].T

    def texts(self, variable: Variable) -> list[str]:
        """Read a cell array of character vectors: references to datasets of UTF-16 characters."""
        import h5py

        stored = self.file[variable.name]
        if variable.kind != "cell" or stored.dtype != h5py.ref_dtype or stored.size > 1 << 16:
            raise UserError(
                f"{printable(self.path)}: expected class names as a cell array, found {variable}"
            )
        texts = [self.file[reference] for reference in stored[()].reshape(-1)]
        for text in texts:
            is_text = isinstance(text, h5py.Dataset) and text.dtype == np.uint16
            if not is_text or text.size > MAX_NAME:
                raise UserError(
                    f"{printable(self.path)}: {printable(variable.name)}: expected character "
                    "vectors"
                )
        return [text[()].astype("<u2").tobytes().decode("utf-16-le", "replace") for text in texts]

    def images(self, variable: Variable) -> hdf5.Rows:
        """Return where the images of a variable are, which are read one mini-batch at a time."""
        layout = "NCWH" if len(variable.shape) == 4 else "NWH"
        return hdf5.rows_of(hdf5.dataset(self.file, variable.name), variable.name, layout)


def mat_file(
    path: str | os.PathLike[str],
    world: World = None,
    part: str = "train",
    *,
    images: str | None = None,
    labels: str | None = None,
    classes: Sequence[str] | None = None,
    labelled: bool = True,
) -> Datastore:
    """Open the images of a .mat file. Collective if a world is given.

    Parameters
    ----------
    path : path-like
        The file.
    world : World, optional
        The ranks that open the file together.
    part : {"train", "test"}
        Part to open, which determines the default names of the variables.
    images : str, optional
        Name of the image variable: uint8, single or double, of size H x W x C x N, or H x W x N for
        gray images.
    labels : str, optional
        Name of the variable that holds the N labels or the targets.
    classes : sequence of str, optional
        Class names of the training set, to which the labels are mapped. An empty sequence means
        that the training set has targets instead of labels.
    labelled : bool
        Whether labels are required.

    Returns
    -------
    Datastore
        The images with their labels or targets.

    Raises
    ------
    UserError
        If the file is damaged, the image and label variables cannot be determined, or the class of
        a label is ambiguous.

    Notes
    -----
    For the training part, the default names are XTrain with YTrain or TTrain, then images with
    labels, then X with Y. For the test part, the default names are XTest with YTest or TTest. If
    the file has none of the default names of the training part, images and labels are each read
    from the only variable of suitable type and size.

    Labels start at 0 or 1. The class names come from a cell array of character vectors named
    `classes` (or classNames, categories, labelNames). Its first entry names label 0 if label 0
    occurs, and label 1 otherwise. Without such an array, the number of a class is its name.

    The label variable is read as float32 targets in the following cases: it holds fractions, N x R
    numbers or N images (H x W x C x N, single or double), or `classes` is empty.
    """
    path = os.fspath(path)

    def inspect():
        """Return (variable or Rows of the images, count, labels, classes, targets, stamp)."""
        with _opened(path) as file:
            selection = select_variables(path, file.variables, part, (images, labels), labelled)
            codes, names, targets = None, list(classes or []), None
            if selection.labels is not None and len(selection.labels.shape) == 4:
                targets = file.images(selection.labels)
            elif selection.labels is not None:
                values = file.numbers(selection.labels)
                if _are_targets(values, selection, classes):
                    with np.errstate(over="ignore"):
                        targets = values.astype(np.float32)
                    targets = targets.reshape(-1) if targets.size == selection.count else targets
                else:
                    texts = selection.classes and file.texts(selection.classes)
                    texts = texts and parse_class_names(texts, printable(path))
                    codes, names = _labels(path, selection, values, texts, classes)
            pixels = selection.images if isinstance(file, Mat5) else file.images(selection.images)
        return pixels, selection.count, codes, names, targets, stamp_of(path)

    pixels, count, codes, names, targets, now = on_rank_0(world, inspect)
    store: Datastore
    if isinstance(pixels, Variable):
        array, _ = once_per_node(world, lambda: (Mat5(path).images(pixels), None), path)
        store = ArrayDatastore(array, codes, names or None, printable(path), layout="NCHW")
    else:
        rows = targets if isinstance(targets, hdf5.Rows) else None
        contents = hdf5.Contents(now, count, pixels, codes, names, rows)
        store = hdf5.of_contents(path, contents)
    return combined(store, targets) if isinstance(targets, np.ndarray) else store


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Mat5 | Mat73]:
    """Open a .mat file. Raise UserError if its header is neither of version 5 nor of 7.3."""
    with reading(path), open_binary(path) as file:
        head = file.read(128)
    number = None
    if head[:6] == b"MATLAB" and head[126:] in (b"IM", b"MI"):
        number = int.from_bytes(head[124:126], "little" if head[126:] == b"IM" else "big")
    if number == 0x0100:
        yield Mat5(path)
    elif number == 0x0200:
        with hdf5.opened(path) as file:
            yield Mat73(path, file)
    else:
        raise UserError(
            f"{printable(path)}: expected a .mat file of version 5 or 7.3 (save -v7, save -v7.3), "
            "found another header"
        )


def _are_targets(values, selection, classes):
    """Return whether the label variable holds targets instead of class labels.

    The values are targets if any value is a fraction, if there are several values per image, or if
    the training set has targets.
    """
    fractions = values.dtype.kind == "f" and bool((values != np.rint(values)).any())
    return fractions or values.size != selection.count or (classes is not None and not len(classes))


def parts_of(path: str) -> list[str]:
    """List the parts of a .mat file: "train", and "test" if it holds both XTrain and XTest."""
    with _opened(path) as file:
        names = {variable.name.lower() for variable in file.variables}
    return ["train", "test"] if {"xtrain", "xtest"} <= names else ["train"]


def select_variables(
    path: str,
    variables: list[Variable],
    part: str,
    names: tuple[str | None, str | None],
    labelled: bool,
) -> Selection:
    """Select the variables that hold images, labels and class names in a file.

    Raises UserError if a variable is missing or has an unsuitable type or size, or if several
    variables are suitable. The part, "train" or "test", determines the default names of the
    variables of images and labels, which None in `names` stands for. `path` is for messages.
    """
    source = printable(path)
    images = _find_images(source, variables, part, names[0])
    if images.kind not in PIXELS or len(images.shape) not in (3, 4):
        raise UserError(
            f"{source}: expected uint8, single or double H x W x C x N as images, found {images}"
        )
    count = images.shape[-1]
    labels = None
    if names[1] or part == "test" or labelled or len(variables) > 1:
        labels = _find_labels(source, variables, images, names[1], labelled)
    if labels is not None and labels.kind not in NUMBERS:
        raise UserError(
            f"{source}: {labels}: expected numbers as labels; in MATLAB, save "
            f"double({labels.name}) and classes = categories({labels.name})"
        )
    if labels is not None and not _fits(labels, count):
        raise UserError(
            f"{source}: expected one label per image, {count} as in the last dimension of "
            f"{images}, or targets: {count} x R numbers, or H x W x C x {count} of single or "
            f"double; found {labels}"
        )
    # Without labels, H x W x C x N differs from other orders only in its number of channels.
    clear = images.shape[2] in (1, 3) if len(images.shape) == 4 else count not in (1, 3)
    if labels is None and not clear:
        raise UserError(
            f"{source}: {images}: expected H x W x C x N with C = 1 or 3; without "
            "labels, the order of the dimensions is ambiguous"
        )
    if not math.prod(images.shape):
        raise UserError(f"{source}: expected images, found none in {images}")
    classes = [v for v in variables if v.name.lower() in CLASSES and v.kind == "cell"]
    return Selection(images, labels, classes[0] if len(classes) == 1 else None, count)


def _is_vector(variable, count):
    """Return whether a variable is a row or a column of `count` values."""
    return (math.prod(variable.shape), max(variable.shape)) == (count, count)


def _fits(labels, count):
    """Return whether a variable has one label, row of numbers or target image per image."""
    shape = labels.shape
    if len(shape) == 4:
        return shape[-1] == count and labels.kind in FLOATS
    is_table = len(shape) == 2 and shape[0] == count and shape[1] > 1
    return _is_vector(labels, count) or is_table


def _find(source, variables, name, default_names):
    """Return the variable with the given name, else with the first default name that exists, or
    None. Raise UserError if the given name does not exist.
    """
    by_name = {v.name if name else v.name.lower(): v for v in variables}
    if name and name not in by_name:
        raise UserError(f"{source}: expected a variable {name}, found {_listing(variables)}")
    return next((by_name[n] for n in ([name] if name else default_names) if n in by_name), None)


def _find_images(source, variables, part, name):
    """Find the image variable by its name, or else by its type and size."""
    images = _find(source, variables, name, IMAGES[part])
    fits = [v for v in variables if len(v.shape) in (3, 4) and v.kind in PIXELS]
    if images is None and (len(fits) != 1 or part == "test"):
        raise UserError(
            f"{source}: expected one variable of images, H x W x C x N of uint8, single "
            f"or double, or the name {IMAGES[part][0].replace('xt', 'XT')}; found "
            f"{_listing(variables)}"
        )
    return images or fits[0]


def _find_labels(source, variables, images, name, labelled):
    """Find the label variable by its name, or else by its type and size.

    Return None if there is no such variable and `labelled` is False.
    """
    count = images.shape[-1]
    labels = _find(source, variables, name, LABELS.get(images.name.lower(), ()))
    if labels is not None:
        return labels
    rest = [v for v in variables if v is not images]
    fits = [v for v in rest if v.kind in NUMBERS and _is_vector(v, count)]
    if len(fits) == 1:
        return fits[0]
    unusable = [v for v in rest if v.kind not in NUMBERS and v.name.lower() in LABEL_NAMES]
    if fits or (labelled and not unusable):
        raise UserError(
            f"{source}: expected one variable of {count} labels for {images}, found "
            f"{_listing(fits or variables)}"
        )
    return unusable[0] if labelled else None  # the caller reports this variable


def _listing(variables):
    """List the first six variables for a message."""
    texts = [str(variable) for variable in variables[:6]]
    return (", ".join(texts) + (", ..." if len(variables) > 6 else "")) or "nothing"


def _labels(path, selection, values, names, classes):
    """Convert MATLAB labels, and return (labels that start at 0, class names)."""
    source = f"{printable(path)}: {printable(selection.labels.name)}"
    codes = integer_labels(values, selection.count, source)
    low, high = int(codes.min()), int(codes.max())
    if names is not None:
        first = 0 if low == 0 else 1
        if low < 0 or high >= len(names) + first:
            raise UserError(
                f"{source}: expected labels from {first} to {len(names) + first - 1}, one for each "
                f"name in {selection.classes.name}, found {low} to {high}"
            )
        return align_labels(codes - first, names, classes, source)
    if classes is not None:
        index = {name: i for i, name in enumerate(classes)}
        used, places = np.unique(codes, return_inverse=True)
        unknown = next((code for code in used[:100000].tolist() if str(code) not in index), None)
        if unknown is not None:
            raise UserError(
                f"{source}: label {unknown} is not one of the classes ({name_list(classes)}): "
                "also save a cell array named classes"
            )
        return np.array([index[str(code)] for code in used])[places], list(classes)
    if low not in (0, 1):
        raise UserError(
            f"{source}: expected labels that start at 0 or 1, found {low} to {high}: the "
            "classes are ambiguous; also save a cell array named classes"
        )
    codes, numbers = align_labels(codes - low, None, None, source)
    return codes, [str(int(number) + low) for number in numbers]


FORMAT = opened_by(
    mat_file,
    "mat",
    recognizes=lambda path, head, option: (
        head.startswith(b"MATLAB") or path.lower().endswith(".mat")
    ),
    parts=parts_of,
    noun="a .mat file",
    suffixes=(".mat",),
)
