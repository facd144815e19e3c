"""Check the labels and class names of a file, and map the labels to the classes of a network."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from mpidl.data.array_datastore import MOST_CLASSES, check_labels
from mpidl.errors import UserError
from mpidl.text import name_list, printable


def align_labels(
    labels: np.ndarray, names: list[str] | None, classes: Sequence[str] | None, source: str
) -> tuple[np.ndarray, list[str]]:
    """Map the labels of a file, integers of at least 0, to the classes of the training set.

    If the file has `names` and there are `classes`, labels are mapped by name. Otherwise, they stay
    as they are. Returns int64 labels (n,) and the classes: the given ones, else `names`, else "0",
    "1", ... up to the highest label. `source` names the labels in messages. Raises UserError if a
    label has no class name, or its class is not among `classes`.
    """
    labels = check_labels(labels, len(labels), names, source)
    if names is None:
        numbers = range(int(labels.max(initial=-1)) + 1)
        names = [str(i) for i in numbers] if classes is None else list(classes)
        return check_labels(labels, len(labels), names, source), names
    if classes is None or list(classes) == list(names):
        return labels, list(names)
    index = {name: i for i, name in enumerate(classes)}
    used = np.unique(labels)
    unknown = [names[i] for i in used if names[i] not in index]
    if unknown:
        raise UserError(
            f"{source}: class {printable(unknown[0])} is not one of the classes "
            f"({name_list(classes)})"
        )
    table = np.zeros(len(names), np.int64)
    table[used] = [index[names[i]] for i in used]
    return table[labels], list(classes)


def parse_class_names(value: object, source: str) -> list[str]:
    """Convert class names stored in a file to a list of strings.

    `value` is a list or array of strings or bytes, or the JSON text of a list of strings. Raises
    UserError if the value is not a list of strings or bytes, or if a name occurs twice.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    names = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(names, list):
        names = [n.decode("utf-8", "replace") if isinstance(n, bytes) else n for n in names]
    if not isinstance(names, list) or len(names) > MOST_CLASSES or not all(map(_is_text, names)):
        raise UserError(
            f"{source}: expected class names as a list of strings, found something else"
        )
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise UserError(
            f"{source}: expected different class names, found {printable(repeated)} twice"
        )
    return names


def _is_text(name):
    """Return whether a name is a string that can be encoded as UTF-8.

    Surrogate escapes, which represent bytes that are not valid UTF-8, are allowed.
    """
    try:
        name.encode("utf-8", "surrogateescape")
    except (AttributeError, UnicodeEncodeError):
        return False
    return True


def integer_labels(values: np.ndarray, count: int, source: str, hint: str = "") -> np.ndarray:
    """Convert `count` labels of integer or float type to int64 (count,).

    `source` names the labels in messages. Raises UserError if the number of labels is not `count`,
    or if a label is not a whole number. The message about fractions ends with `hint`.
    """
    values = np.asarray(values)
    flat = values.reshape(-1)
    if len(flat) != count or max(values.shape, default=1) != count:
        raise UserError(
            f"{source}: expected one label per image, ({count},), found shape {values.shape}"
        )
    if flat.dtype.kind == "f":
        if not np.isfinite(flat).all() or (flat != np.rint(flat)).any() or abs(flat).max() > 2**53:
            raise UserError(f"{source}: expected whole numbers as labels, found fractions{hint}")
    elif flat.dtype.kind not in "biu" or (flat.dtype == np.uint64 and flat.max(initial=0) >> 62):
        raise UserError(f"{source}: expected whole numbers as labels, found {flat.dtype}")
    return flat.astype(np.int64)
