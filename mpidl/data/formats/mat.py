"""Read H x W x C x N images, with labels or targets, from MATLAB .mat files (version 7.3 or 5).

A version 7.3 file is an HDF5 file and is read one mini-batch at a time. A version 5 file (save -v7
or save -v6; see `mat5`) is loaded completely, once per host. The module reads numeric arrays, and
class names stored as a cell array of character vectors. It never interprets objects, function
handles or categorical arrays.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpidl.data.array_datastore import ArrayDatastore
from mpidl.data.combined import combined
from mpidl.data.datastore import Datastore
from mpidl.data.formats import hdf5, mat5
from mpidl.data.formats.format import World, format_of_parts
from mpidl.data.formats.hdf5 import HDF5Datastore
from mpidl.data.formats.mat5 import Variable
from mpidl.data.labels import align_labels, integer_labels, parse_class_names
from mpidl.data.loading.node_memory import once_per_node
from mpidl.data.storage.paths import open_binary, stamp_of
from mpidl.errors import UserError
from mpidl.files import on_rank_0, unreadable
from mpidl.text import printable

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
CLASSES = ("classes", "classnames", "categories", "labelnames", "label_names")
NUMBERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("single", "double")
MAX_NAME = 4096  # maximum number of characters in a class name


class Selection(NamedTuple):
    """The variables selected for images, labels and class names, and the number of images.

    `labels` and `classes` are None if the file has no such variable.
    """

    images: Variable
    labels: Variable | None
    classes: Variable | None
    count: int


class Mat73(HDF5Datastore):
    """A datastore of the images in a version 7.3 .mat file."""

    def __init__(self, path: str, contents: hdf5.Contents):
        self.path = path
        self._set_contents(contents)


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
    names = images, labels

    def inspect():
        if version(path) == "5":
            return None
        return _inspect_73(path, part, names, classes, labelled)

    def load():
        return _load_5(path, part, names, classes, labelled)

    inspected = on_rank_0(world, inspect)
    if inspected is not None:
        contents, numbers = inspected
        store: Datastore = Mat73(path, contents)
        return store if numbers is None else combined(store, numbers)
    pixels, (codes, class_names, targets) = once_per_node(world, load, path)
    store = ArrayDatastore(pixels, codes, class_names or None, printable(path), layout="NCHW")
    return store if targets is None else combined(store, targets)


def _inspect_73(path, part, names, classes, labelled):
    """Return the Contents of a version 7.3 file, and its targets if they are numbers."""
    with hdf5.opened(path) as file:
        selection = select_variables(path, variables_73(file), part, names, labelled)
        rows = hdf5.rows_of(
            hdf5.dataset(file, selection.images.name),
            selection.images.name,
            "NCWH" if len(selection.images.shape) == 4 else "NWH",
        )
        codes, class_names, numbers, images_as_targets = None, list(classes or []), None, None
        if selection.labels is not None and len(selection.labels.shape) == 4:
            name = selection.labels.name
            images_as_targets = hdf5.rows_of(hdf5.dataset(file, name), name, "NCWH")
        elif selection.labels is not None:
            values = hdf5.dataset(file, selection.labels.name)[()].T
            if _are_targets(values, selection, classes):
                numbers = _numbers(values, selection)
            else:
                texts = selection.classes and names_73(file, path, selection.classes)
                codes, class_names = _labels(path, selection, values, texts, classes)
        now = stamp_of(path)
        contents = hdf5.Contents(now, selection.count, rows, codes, class_names, images_as_targets)
        return contents, numbers


def _load_5(path, part, names, classes, labelled):
    """Load a version 5 file; return (pixels, (labels, class names, targets))."""
    selection = select_variables(path, mat5.variables(path), part, names, labelled)
    values = mat5.load(path, [v for v in selection[:2] if v is not None])
    pixels = values[selection.images.name]
    pixels = pixels if pixels.ndim == 4 else pixels[:, :, None]
    codes, class_names, targets = None, list(classes or []), None
    if selection.labels is not None:
        numbers = values[selection.labels.name]
        if numbers.ndim == 4:
            targets = _images_of(numbers)
        elif _are_targets(numbers, selection, classes):
            targets = _numbers(numbers, selection)
        else:
            texts = selection.classes and mat5.texts(path, selection.classes)
            texts = texts and parse_class_names(texts, printable(path))
            codes, class_names = _labels(path, selection, numbers, texts, classes)
    return _images_of(pixels), (codes, class_names, targets)


def _images_of(pixels):
    """Transpose H x W x C x N pixels to (n, C, H, W), and convert floats to float32."""
    if pixels.dtype != np.uint8:
        with np.errstate(over="ignore"):  # `read_images` reports images with infinities
            pixels = pixels.astype(np.float32)
    return np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))


def _are_targets(values, selection, classes):
    """Return whether the label variable holds targets instead of class labels.

    The values are targets if any value is a fraction, if there are several values per image, or if
    the training set has targets.
    """
    fractions = values.dtype.kind == "f" and bool((values != np.rint(values)).any())
    return fractions or values.size != selection.count or (classes is not None and not len(classes))


def _numbers(values, selection):
    """Convert a MATLAB row, column or N x R matrix to float32 targets (n,) or (n, R)."""
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    return values.reshape(-1) if values.size == selection.count else values


def version(path: str) -> str:
    """Read the version of a .mat file, "7.3" or "5", from the first 128 bytes of the file.

    Raises UserError if the file cannot be read, or if its header matches neither version.
    """
    try:
        with open_binary(path) as file:
            head = file.read(128)
    except OSError as e:
        raise unreadable(path, e) from None
    if head[:6] == b"MATLAB" and len(head) == 128 and head[126:] in (b"IM", b"MI"):
        number = int.from_bytes(head[124:126], "little" if head[126:] == b"IM" else "big")
        if number in (0x0100, 0x0200):
            return "5" if number == 0x0100 else "7.3"
    raise UserError(
        f"{printable(path)}: expected a .mat file of version 5 or 7.3 (save -v7, save -v7.3), "
        "found another header"
    )


def has_test_part(path: str) -> bool:
    """Return whether a .mat file holds both XTrain and XTest."""
    if version(path) == "5":
        variables = mat5.variables(path)
    else:
        with hdf5.opened(path) as file:
            variables = variables_73(file)
    names = {variable.name.lower() for variable in variables}
    return "xtest" in names and "xtrain" in names


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
    images = _find(path, variables, names[0]) if names[0] else _images(path, variables, part)
    if images.kind not in ("uint8", *FLOATS) or len(images.shape) not in (3, 4):
        raise UserError(
            f"{source}: expected uint8, single or double H x W x C x N as images, found {images}"
        )
    count = images.shape[-1]
    labels = None
    if names[1]:
        labels = _find(path, variables, names[1])
    elif part == "test" or labelled or len(variables) > 1:
        labels = _labels_of(path, variables, images, count, labelled)
    if labels is not None and labels.kind not in (*NUMBERS, *FLOATS, "logical"):
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


def _fits(labels, count):
    """Return whether a variable has one label, row of numbers or target image per image."""
    shape = labels.shape
    if len(shape) == 4:
        return shape[-1] == count and labels.kind in FLOATS
    return (math.prod(shape), max(shape)) == (count, count) or (
        len(shape) == 2 and shape[0] == count and shape[1] > 1
    )


def _find(path, variables, name):
    """Return the variable with the given name. Raise UserError if it does not exist."""
    for variable in variables:
        if variable.name == name:
            return variable
    raise UserError(f"{printable(path)}: expected a variable {name}, found {_listing(variables)}")


def _images(path, variables, part):
    """Find the image variable by its default name, or else by its type and size."""
    by_name = {variable.name.lower(): variable for variable in variables}
    for name in IMAGES[part]:
        if name in by_name:
            return by_name[name]
    fits = [v for v in variables if len(v.shape) in (3, 4) and v.kind in ("uint8", *FLOATS)]
    if len(fits) != 1 or part == "test":
        raise UserError(
            f"{printable(path)}: expected one variable of images, H x W x C x N of uint8, single "
            f"or double, or the name {IMAGES[part][0].replace('xt', 'XT')}; found "
            f"{_listing(variables)}"
        )
    return fits[0]


def _labels_of(path, variables, images, count, labelled):
    """Find the label variable by its default name, or else by its type and size.

    Return None if there is no such variable and `labelled` is False.
    """
    by_name = {variable.name.lower(): variable for variable in variables}
    for name in LABELS.get(images.name.lower(), ()):
        if name in by_name:
            return by_name[name]
    label_names = {name for names in LABELS.values() for name in names}
    numeric = (*NUMBERS, *FLOATS, "logical")
    fits = [
        v
        for v in variables
        if v.kind in numeric
        and v is not images
        and (math.prod(v.shape), max(v.shape)) == (count, count)
    ]
    if len(fits) == 1:
        return fits[0]
    unusable = [v for v in variables if v.kind not in numeric and v.name.lower() in label_names]
    if len(fits) > 1 or (labelled and not unusable):
        raise UserError(
            f"{printable(path)}: expected one variable of {count} labels for {images}, found "
            f"{_listing(fits or variables)}"
        )
    return unusable[0] if unusable and labelled else None  # the caller reports this variable


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
        used = np.unique(codes)
        unknown = [int(code) for code in used[:100000] if str(code) not in index]
        if unknown:
            raise UserError(
                f"{source}: label {unknown[0]} is not one of the classes "
                f"({', '.join(map(printable, classes))}): also save a cell array named classes"
            )
        return np.array([index[str(c)] for c in used])[np.searchsorted(used, codes)], list(classes)
    if low not in (0, 1):
        raise UserError(
            f"{source}: expected labels that start at 0 or 1, found {low} to {high}: the "
            "classes are ambiguous; also save a cell array named classes"
        )
    codes, numbers = align_labels(codes - low, None, None, source)
    return codes, [str(int(number) + low) for number in numbers]


def variables_73(file: h5py.File) -> list[Variable]:
    """List the variables of an open version 7.3 file."""
    import h5py

    variables = []
    for name in file:
        link = file.get(name, getlink=True)
        if name.startswith("#") or not isinstance(link, h5py.HardLink):
            continue
        stored = file[name]
        if isinstance(stored, h5py.Dataset) and stored.shape is not None:
            kind = hdf5.attribute(stored, "MATLAB_class")
            kind = printable(kind[:40]) if isinstance(kind, bytes) else "unknown"
            variables.append(Variable(name, tuple(int(n) for n in stored.shape[::-1]), kind))
    return variables


def names_73(file: h5py.File, path: str, variable: Variable) -> list[str]:
    """Return the class names in a cell array of an open version 7.3 file.

    Each cell is a reference to a dataset of UTF-16 characters.
    """
    import h5py

    stored = file[variable.name]
    if variable.kind != "cell" or stored.dtype != h5py.ref_dtype or stored.size > 1 << 16:
        raise UserError(
            f"{printable(path)}: expected class names as a cell array, found {variable}"
        )
    names = []
    for reference in stored[()].reshape(-1):
        text = file[reference]
        if not isinstance(text, h5py.Dataset) or text.dtype != np.uint16 or text.size > MAX_NAME:
            raise UserError(
                f"{printable(path)}: {printable(variable.name)}: expected character vectors"
            )
        names.append(text[()].astype("<u2").tobytes().decode("utf-16-le", "replace"))
    return parse_class_names(names, printable(path))


FORMAT = format_of_parts(
    "mat",
    recognizes=lambda path, head, option: (
        head.startswith(b"MATLAB") or path.lower().endswith(".mat")
    ),
    open_part=lambda path, part, world, options: mat_file(
        path, world, part, classes=options.classes, labelled=options.labelled
    ),
    parts=lambda path: ["train", "test"] if has_test_part(path) else ["train"],
    noun="a .mat file",
    suffixes=(".mat",),
)
