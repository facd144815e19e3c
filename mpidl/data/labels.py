"""Labels and class names as files have them, brought to those that a network was trained on."""

import json

import numpy as np

from mpidl.data.datastore import MOST_CLASSES, check_labels
from mpidl.errors import UserError
from mpidl.text import printable


def agreed(labels, names, classes, source):
    """(labels, classes): int64 (n,), and the names that they count by.

    names: the file's own, None where it has none; classes: those of the set trained on, None where
    this set is the first. With both, labels are brought to `classes` by name. UserError where a
    label is none of them.
    """
    labels = check_labels(labels, len(labels), names, source)
    if names is None:
        found = range(int(labels.max(initial=-1)) + 1)
        names = [str(i) for i in found] if classes is None else list(classes)
        return check_labels(labels, len(labels), names, source), names
    if classes is None or list(classes) == list(names):
        return labels, list(names)
    place = {name: i for i, name in enumerate(classes)}
    used = np.unique(labels)
    strange = [names[i] for i in used if names[i] not in place]
    if strange:
        known = ", ".join(printable(name) for name in classes)
        raise UserError(f"{source}: class {printable(strange[0])} is none of the classes ({known})")
    table = np.zeros(len(names), np.int64)
    table[used] = [place[names[i]] for i in used]
    return table[labels], list(classes)


def names_of(value, source):
    """Class names from what a file holds: a list of texts, or JSON of one. UserError else."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list) or len(value) > MOST_CLASSES:
        raise UserError(f"{source}: expected class names as a list of texts, found something else")
    names = [name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in value]
    if not all(isinstance(name, str) and _is_text(name) for name in names):
        raise UserError(f"{source}: expected class names as a list of texts, found something else")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{source}: expected different class names, found {printable(twice)} twice")
    return names


def _is_text(name):
    """Whether a name can be written down; bytes of a file name that are no UTF-8 can be."""
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def whole_numbers(values, count, source, hint=""):
    """Labels as files of floats have them too, as int64 (count,); UserError where they are none,
    with a hint where they are fractions."""
    values = np.asarray(values)
    flat = values.reshape(-1)
    if len(flat) != count or max(values.shape, default=1) != count:
        raise UserError(
            f"{source}: expected one label an image, ({count},), found shape {values.shape}"
        )
    if flat.dtype.kind == "f":
        if not np.isfinite(flat).all() or (flat != np.rint(flat)).any() or abs(flat).max() > 2**53:
            raise UserError(f"{source}: expected whole numbers as labels, found fractions{hint}")
    elif flat.dtype.kind not in "biu" or (flat.dtype == np.uint64 and flat.max(initial=0) >> 62):
        raise UserError(f"{source}: expected whole numbers as labels, found {flat.dtype}")
    return flat.astype(np.int64)


def check_int32(values, source):
    """A UserError where whole numbers do not fit the int32 that targets are."""
    least, most = int(values.min(initial=0)), int(values.max(initial=0))
    if least < -(1 << 31) or most >= 1 << 31:
        raise UserError(f"{source}: expected targets that int32 holds, found {least} to {most}")
