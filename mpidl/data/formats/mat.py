"""MATLAB's .mat files: H x W x C x N images and their labels or targets, of version 7.3 or 5.

A file of version 7.3 is HDF5 and is read a mini-batch at a time; an older one (`mat5`: save -v7,
-v6) is read whole, once per node. Only numbers, and class names as a cell array of texts, are taken
out of it: objects, function handles and categorical arrays are never made sense of.
"""

import math
import os
from typing import NamedTuple

import numpy as np

from mpidl.data.combined import combined
from mpidl.data.datastore import ArrayDatastore
from mpidl.data.formats import hdf5, mat5
from mpidl.data.formats.format import format_of_parts
from mpidl.data.formats.hdf5 import HDF5Datastore
from mpidl.data.formats.mat5 import Variable
from mpidl.data.labels import align_labels, integer_labels, parse_class_names
from mpidl.data.loading.node_memory import once_per_node
from mpidl.errors import UserError
from mpidl.files import on_rank_0, stamp, unreadable
from mpidl.text import printable

# The names that are looked for first, in this order, without regard to capitals.
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
MOST_OF_A_NAME = 4096  # characters


class Chosen(NamedTuple):
    """Which variables are the images, their labels and the class names (the last two or None)."""

    images: Variable
    labels: Variable | None
    classes: Variable | None
    count: int


class Mat73(HDF5Datastore):
    """The images of a .mat file of version 7.3."""

    def __init__(self, path, found):
        self.path = path
        self._take(found)


def mat_file(
    path, world=None, which="train", *, images=None, labels=None, classes=None, labelled=True
):
    """The images of a .mat file as a datastore. Collective with a world.

    images: the name of a variable of uint8, single or double, H x W x C x N, or H x W x N of gray
    images; labels: that of N numbers. Where they are not given: XTrain and YTrain, or TTrain
    (which="test": XTest and YTest, or TTest), images and labels, X and Y; else the only variables
    of such sizes. Labels that begin with 0 or with 1 count classes, called by their number, or by a
    cell array `classes` (classNames, categories, labelNames) of texts, whose first is label 1, or 0
    where one is 0. classes: the names to bring labels to. labelled=False: labels may be missing.
    UserError where it is unclear which variable is what, or what a label means.

    Such a variable has targets, as float32, where it holds fractions, N x R numbers (R an image) or
    an image each, H x W x C x N of single or double; whole numbers, too, where classes is empty, as
    it is of a set with targets.
    """
    path = os.fspath(path)
    named = images, labels

    def look():
        if version(path) == "5":
            return None
        with hdf5.opened(path) as file:
            chosen = choose(path, variables_73(file), which, named, labelled)
            rows = hdf5.rows_of(
                hdf5.dataset(file, chosen.images.name),
                chosen.images.name,
                "NCWH" if len(chosen.images.shape) == 4 else "NWH",
            )
            codes, known, numbers, images_as_targets = None, list(classes or []), None, None
            if chosen.labels is not None and len(chosen.labels.shape) == 4:
                name = chosen.labels.name
                images_as_targets = hdf5.rows_of(hdf5.dataset(file, name), name, "NCWH")
            elif chosen.labels is not None:
                values = hdf5.dataset(file, chosen.labels.name)[()].T
                if _are_targets(values, chosen, classes):
                    numbers = _numbers(values, chosen)
                else:
                    names = chosen.classes and names_73(file, path, chosen.classes)
                    codes, known = _labels(path, chosen, values, names, classes)
            now = stamp(os.stat(path))
            found = hdf5.Found(now, chosen.count, rows, codes, known, images_as_targets)
            return found, numbers

    held = on_rank_0(world, look)
    if held is not None:
        found, numbers = held
        return Mat73(path, found) if numbers is None else combined(Mat73(path, found), numbers)

    def load():
        chosen = choose(path, mat5.variables(path), which, named, labelled)
        values = mat5.load(path, [v for v in chosen[:2] if v is not None])
        pixels = values[chosen.images.name]
        pixels = pixels if pixels.ndim == 4 else pixels[:, :, None]
        codes, known, targets = None, list(classes or []), None
        if chosen.labels is not None:
            held = values[chosen.labels.name]
            if held.ndim == 4:
                targets = _images_of(held)
            elif _are_targets(held, chosen, classes):
                targets = _numbers(held, chosen)
            else:
                names = chosen.classes and mat5.texts(path, chosen.classes)
                names = names and parse_class_names(names, printable(path))
                codes, known = _labels(path, chosen, held, names, classes)
        return _images_of(pixels), (codes, known, targets)

    pixels, (codes, known, targets) = once_per_node(world, load, path)
    images = ArrayDatastore(pixels, codes, known or None, source=printable(path))
    return images if targets is None else combined(images, targets)


def _images_of(pixels):
    """(n, C, H, W), uint8 or float32, of H x W x C x N."""
    if pixels.dtype != np.uint8:
        with np.errstate(over="ignore"):  # an infinity is told of when it is read
            pixels = pixels.astype(np.float32)
    return np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))


def _are_targets(values, chosen, classes):
    """Whether numbers beside the images are targets: fractions, several an image, or those of a set
    that goes with one that has targets."""
    fractions = values.dtype.kind == "f" and bool((values != np.rint(values)).any())
    return fractions or values.size != chosen.count or (classes is not None and not len(classes))


def _numbers(values, chosen):
    """(n,) or (n, R) float32 of numbers as MATLAB has them: a row or a column, or N x R."""
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    return values.reshape(-1) if values.size == chosen.count else values


def version(path):
    """ "7.3" or "5", by the first 128 bytes of a .mat file; UserError where they say neither."""
    try:
        with open(path, "rb") as file:
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


def has_test_part(path):
    """Whether a .mat file holds XTest beside its training images."""
    if version(path) == "5":
        variables = mat5.variables(path)
    else:
        with hdf5.opened(path) as file:
            variables = variables_73(file)
    names = {variable.name.lower() for variable in variables}
    return "xtest" in names and "xtrain" in names


def choose(path, variables, which, named, labelled):
    """Chosen, of a file's variables; named: (images, labels) as the caller calls them, or None."""
    where = printable(path)
    images = _named(path, variables, named[0]) if named[0] else _images(path, variables, which)
    if images.kind not in ("uint8", *FLOATS) or len(images.shape) not in (3, 4):
        raise UserError(
            f"{where}: expected uint8, single or double H x W x C x N as images, found {images}"
        )
    count = images.shape[-1]
    labels = None
    if named[1]:
        labels = _named(path, variables, named[1])
    elif which == "test" or labelled or len(variables) > 1:
        labels = _labels_of(path, variables, images, count, labelled)
    if labels is not None and labels.kind not in (*NUMBERS, *FLOATS, "logical"):
        raise UserError(
            f"{where}: {labels}: expected numbers as labels; in MATLAB, save double({labels.name}) "
            f"and classes = categories({labels.name})"
        )
    if labels is not None and not _fits(labels, count):
        raise UserError(
            f"{where}: expected one label an image, {count} as the last dimension of {images}, or "
            f"targets: {count} x R numbers, or H x W x C x {count} of single or double; found "
            f"{labels}"
        )
    # Without labels only the number of channels tells H x W x C x N from other orders.
    clear = images.shape[2] in (1, 3) if len(images.shape) == 4 else count not in (1, 3)
    if labels is None and not clear:
        raise UserError(
            f"{where}: {images}: expected H x W x C x N with C of 1 or 3; it is unclear"
        )
    if not math.prod(images.shape):
        raise UserError(f"{where}: expected images, found none in {images}")
    names = [v for v in variables if v.name.lower() in CLASSES and v.kind == "cell"]
    return Chosen(images, labels, names[0] if len(names) == 1 else None, count)


def _fits(labels, count):
    """Whether a variable has a label, a row of numbers or an image for each of `count` images."""
    shape = labels.shape
    if len(shape) == 4:
        return shape[-1] == count and labels.kind in FLOATS
    return (math.prod(shape), max(shape)) == (count, count) or (
        len(shape) == 2 and shape[0] == count and shape[1] > 1
    )


def _named(path, variables, name):
    for variable in variables:
        if variable.name == name:
            return variable
    raise UserError(f"{printable(path)}: expected a variable {name}, found {_some(variables)}")


def _images(path, variables, which):
    """The variable of images, where no name was given."""
    by_name = {variable.name.lower(): variable for variable in variables}
    for name in IMAGES[which]:
        if name in by_name:
            return by_name[name]
    fits = [v for v in variables if len(v.shape) in (3, 4) and v.kind in ("uint8", *FLOATS)]
    if len(fits) != 1 or which == "test":
        raise UserError(
            f"{printable(path)}: expected one variable of images, H x W x C x N of uint8, single "
            f"or double, or the name {IMAGES[which][0].replace('xt', 'XT')}; found "
            f"{_some(variables)}"
        )
    return fits[0]


def _labels_of(path, variables, images, count, labelled):
    """The variable of the labels of these images, where no name was given; or None."""
    by_name = {variable.name.lower(): variable for variable in variables}
    for name in LABELS.get(images.name.lower(), ()):
        if name in by_name:
            return by_name[name]
    known = {name for names in LABELS.values() for name in names}
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
    others = [v for v in variables if v.kind not in numeric and v.name.lower() in known]
    if len(fits) > 1 or (labelled and not others):
        raise UserError(
            f"{printable(path)}: expected one variable of {count} labels for {images}, found "
            f"{_some(fits or variables)}"
        )
    return others[0] if others and labelled else None


def _some(variables):
    texts = [str(variable) for variable in variables[:6]]
    return (", ".join(texts) + (", ..." if len(variables) > 6 else "")) or "nothing"


def _labels(path, chosen, values, names, classes):
    """(labels from 0, class names) of the numbers that MATLAB stored as labels."""
    where = f"{printable(path)}: {printable(chosen.labels.name)}"
    codes = integer_labels(values, chosen.count, where)
    low, high = int(codes.min()), int(codes.max())
    if names is not None:
        first = 0 if low == 0 else 1
        if low < 0 or high >= len(names) + first:
            raise UserError(
                f"{where}: expected labels from 1 to {len(names)}, as many as "
                f"{chosen.classes.name} has, found {low} to {high}"
            )
        return align_labels(codes - first, names, classes, where)
    if classes is not None:
        place = {name: i for i, name in enumerate(classes)}
        used = np.unique(codes)
        strange = [int(code) for code in used[:100000] if str(code) not in place]
        if strange:
            raise UserError(
                f"{where}: label {strange[0]} is none of the classes "
                f"({', '.join(printable(name) for name in classes)}): save a cell array classes too"
            )
        return np.array([place[str(c)] for c in used])[np.searchsorted(used, codes)], list(classes)
    if low not in (0, 1):
        raise UserError(
            f"{where}: expected labels that begin with 0 or 1, found {low} to {high}: it is "
            "unclear which classes they are; save a cell array classes too"
        )
    codes, found = align_labels(codes - low, None, None, where)
    return codes, [str(int(name) + low) for name in found]


def variables_73(file):
    """The variables of an open file of version 7.3."""
    import h5py

    found = []
    for name in file:
        link = file.get(name, getlink=True)
        if name.startswith("#") or not isinstance(link, h5py.HardLink):
            continue
        held = file[name]
        if isinstance(held, h5py.Dataset) and held.shape is not None:
            kind = hdf5.attribute(held, "MATLAB_class")
            kind = printable(kind[:40]) if isinstance(kind, bytes) else "unknown"
            found.append(Variable(name, tuple(int(n) for n in held.shape[::-1]), kind))
    return found


def names_73(file, path, variable):
    """Class names in a cell array of texts, each a dataset that the cell refers to."""
    import h5py

    held = file[variable.name]
    if variable.kind != "cell" or held.dtype != h5py.ref_dtype or held.size > 1 << 16:
        raise UserError(
            f"{printable(path)}: expected class names as a cell array, found {variable}"
        )
    names = []
    for reference in held[()].reshape(-1):
        text = file[reference]
        if (
            not isinstance(text, h5py.Dataset)
            or text.dtype != np.uint16
            or text.size > MOST_OF_A_NAME
        ):
            raise UserError(f"{printable(path)}: {printable(variable.name)}: expected texts in it")
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
