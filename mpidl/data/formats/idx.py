"""Read IDX files, the format of MNIST, Fashion-MNIST and similar data sets, plain or .gz."""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Sequence

import numpy as np

from mpidl.data.array_datastore import ArrayDatastore, check_labels
from mpidl.data.formats.format import World, check_images, check_part, opened_by
from mpidl.data.loading.node_memory import once_per_node
from mpidl.data.paths import is_file, open_binary, reading, stamp_of
from mpidl.errors import UserError
from mpidl.text import printable

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MAX_DIMENSIONS = 8
DEFLATE_RATIO = 1032  # maximum compression ratio of deflate
DIMENSIONS = {"images": 3, "labels": 1}
PREFIX = {"train": "train", "test": "t10k"}


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """Read the array in a plain or gzip-compressed IDX file.

    Parameters
    ----------
    path : path-like
        The file. It consists of a magic number (the bytes 0, 0, data type, number of dimensions),
        the size of each dimension, and the elements of the array.

    Returns
    -------
    ndarray
        The array, in the byte order of this machine.

    Raises
    ------
    UserError
        If the file is missing or damaged, or has another format.
    """
    path = os.fspath(path)
    with reading(path), open_binary(path) as raw:
        packed, on_disk = path.endswith(".gz"), stamp_of(path).size
        file = gzip.GzipFile(fileobj=raw) if packed else raw
        head = file.read(4 + 4 * MAX_DIMENSIONS)
        dtype, sizes, start = _header(head, path)
        expected = start + math.prod(sizes) * dtype.itemsize
        # The first check keeps a file from claiming more memory than it can fill.
        size = f"{on_disk} compressed" if packed else str(on_disk)
        if is_possible := expected <= on_disk * DEFLATE_RATIO + 4096:
            data = head + file.read(max(0, expected - len(head)))
            excess = file.read(1)
            size = str(len(data) + len(excess) if packed or not excess else on_disk)
    if not is_possible or len(data) != expected or excess:
        is_long = is_possible and (len(data) > expected or excess)
        raise UserError(
            f"{printable(path)}: expected {expected} bytes for its sizes {sizes}, found {size}: "
            f"the file is {'too long' if is_long else 'truncated'}"
        )
    values = np.frombuffer(data, dtype, math.prod(sizes), start).reshape(sizes)
    return values.astype(dtype.newbyteorder("="), copy=False)


def _header(head, path):
    """Parse the first bytes of an IDX file and return (dtype, sizes, offset of the elements)."""
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in TYPES or not head[3]:
        raise UserError(
            f"{printable(path)}: expected an IDX file, which begins with bytes 0, 0, type, "
            f"dimensions; found {list(head[:4])}"
        )
    if head[3] > MAX_DIMENSIONS:
        raise UserError(
            f"{printable(path)}: expected an IDX file of {MAX_DIMENSIONS} dimensions at most, "
            f"found {head[3]}"
        )
    start = 4 + 4 * head[3]
    if len(head) < start:
        raise UserError(
            f"{printable(path)}: expected a header of {start} bytes, found {len(head)}: the "
            "file is truncated"
        )
    sizes = [int.from_bytes(head[i : i + 4], "big") for i in range(4, start, 4)]
    if not math.prod(sizes):
        sizes = [sizes[0] if len(sizes) == 1 else 0] + [min(size, 1 << 16) for size in sizes[1:]]
    return np.dtype(TYPES[head[2]]), sizes, start


def find_file(folder: str, part: str, kind: str) -> str | None:
    """Return the path of the file with a part's images or labels, or None if it does not exist.

    An example of a file name is train-images-idx3-ubyte. A dot may replace the dash before "idx",
    and the name may end with ".gz".
    """
    for separator in "-.":
        for suffix in ("", ".gz"):
            name = f"{PREFIX[part]}-{kind}{separator}idx{DIMENSIONS[kind]}-ubyte{suffix}"
            path = os.path.join(folder, name)
            if is_file(path):
                return path
    return None


def is_idx_folder(folder: str, part: str | None = None) -> bool:
    """Return whether a folder has the images of `part`, or of any part if `part` is None."""
    return any(find_file(folder, name, "images") for name in ([part] if part else PREFIX))


def idx_folder(
    folder: str | os.PathLike[str],
    part: str = "train",
    world: World = None,
    *,
    classes: Sequence[str] | None = None,
    labelled: bool = True,
) -> ArrayDatastore:
    """Open the training or test images in a folder of IDX files.

    With a world, the call is collective.

    Parameters
    ----------
    folder : path-like
        Folder that contains the files.
    part : {"train", "test"}
        Part to open: "train" for the files train-*, or "test" for the files t10k-*.
    world : World, optional
        The ranks that open the files together. The ranks of a node share one copy of the pixels.
    classes : sequence of str, optional
        Class names in the order of the labels, by default "0", "1", ... up to the highest label.
    labelled : bool
        Whether a file of labels is required. If False and there is no such file, the datastore has
        no labels.

    Returns
    -------
    ArrayDatastore
        The images.

    Raises
    ------
    UserError
        If a file is missing or damaged, or if a label is not below the number of classes.
    """
    check_part(part, folder, tuple(PREFIX))
    folder = os.fspath(folder)

    def load():
        images, labels = (find_file(folder, part, kind) for kind in DIMENSIONS)
        if images is None or (labelled and labels is None):
            kind = "labels" if images else "images"
            raise UserError(
                f"{printable(folder)}: expected {PREFIX[part]}-{kind}-idx{DIMENSIONS[kind]}-ubyte, "
                "or .gz, in this folder; found no such file"
            )
        pixels = read_pixels(images)
        if labels is not None:
            labels = check_labels(read_idx(labels), len(pixels), classes, printable(labels))
        return pixels, (images, labels)

    pixels, (path, labels) = once_per_node(world, load, folder)
    return ArrayDatastore(pixels, labels, classes, source=printable(path))


def read_pixels(path: str) -> np.ndarray:
    """Read the pixels of an IDX file. Raise UserError if the file does not hold images."""
    pixels = read_idx(path)
    check_images(pixels.shape, pixels.dtype, printable(path))
    return pixels


FORMAT = opened_by(
    idx_folder,
    "idx",
    recognizes=lambda path, head, option: is_idx_folder(path),
    parts=lambda path: [part for part in PREFIX if is_idx_folder(path, part)],
)
