"""IDX files, plain or .gz: the form of MNIST, Fashion-MNIST and their kin."""

import gzip
import math
import os
import zlib

import numpy as np

from mpidl.data.datastore import ArrayDatastore, checked_labels, on_rank_0, shown
from mpidl.errors import UserError

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
PREFIX = {"train": "train", "test": "t10k"}


def read_idx(path):
    """The array in an IDX file: a magic number (0, 0, type, dimensions), sizes, values."""
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise UserError(f"{shown(path)}: no such file") from None
    except (OSError, EOFError, zlib.error) as e:
        why = getattr(e, "strerror", None) or e
        raise UserError(f"{shown(path)}: the file cannot be read: {why}") from None
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in TYPES or not data[3]:
        raise UserError(
            f"{shown(path)}: expected an IDX file, which begins with bytes 0, 0, type, dimensions; "
            f"found {list(data[:4])}"
        )
    start = 4 + 4 * data[3]
    sizes = [int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4)]
    dtype = np.dtype(TYPES[data[2]])
    expected = start + math.prod(sizes) * dtype.itemsize
    if len(data) < start or len(data) != expected:
        what = f"{expected} bytes for its sizes {sizes}" if len(data) >= start else "all its sizes"
        raise UserError(
            f"{shown(path)}: expected {what}, found {len(data)}: the file is "
            f"{'cut short' if len(data) < expected else 'too long'}"
        )
    values = np.frombuffer(data, dtype, offset=start).reshape(sizes)
    return values.astype(dtype.newbyteorder("="), copy=False)


def find(folder, which, kind):
    """The path of train-images-idx3-ubyte and the like, with a dash or a dot, plain or .gz."""
    dimensions = {"images": 3, "labels": 1}[kind]
    for separator in "-.":
        for suffix in ("", ".gz"):
            name = f"{PREFIX[which]}-{kind}{separator}idx{dimensions}-ubyte{suffix}"
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                return path
    return None


def is_idx_folder(folder, which=None):
    """Whether the images of `which` ("train", "test", None: any of the two) are in the folder."""
    return any(find(folder, w, "images") for w in ([which] if which else PREFIX))


def idx_folder(folder, which="train", world=None, *, classes=None, labelled=True):
    """The training or test images of a folder of IDX files, as an ArrayDatastore.

    which: "train" (train-*) or "test" (t10k-*). classes: names by label; "0" to the highest label
    where not given. labelled=False: a missing file of labels means that they are not known.
    With a world it is collective, and the pixels lie in memory once per node.
    """
    if which not in PREFIX:
        raise UserError(f'{shown(folder)}: which set must be "train" or "test", got {which!r}')

    def load():
        images, labels = (find(folder, which, kind) for kind in ("images", "labels"))
        for path, kind, wanted in ((images, "images", True), (labels, "labels", labelled)):
            if wanted and path is None:
                n = 3 if kind == "images" else 1
                raise UserError(
                    f"{shown(folder)}: expected {PREFIX[which]}-{kind}-idx{n}-ubyte, or .gz, in "
                    "this folder; found no such file"
                )
        pixels = checked_images(images)
        if labels is None:
            return images, pixels, None
        return images, pixels, checked_labels(read_idx(labels), len(pixels), classes, shown(labels))

    if world is None:
        path, pixels, labels = load()
    else:
        own = {}

        def load_and_keep():
            path, own["pixels"], labels = load()
            return path, own["pixels"].shape, own["pixels"].dtype.str, labels

        path, shape, dtype, labels = on_rank_0(world, load_and_keep)
        pixels = once_per_node(world, shape, dtype, lambda: own.pop("pixels", None), path)
    return ArrayDatastore(pixels, labels, classes, source=shown(path))


def checked_images(path):
    """The pixels of an IDX file of images; UserError where it holds something else."""
    pixels = read_idx(path)
    if not pixels.size:
        raise UserError(f"{shown(path)}: expected images, found none (sizes {pixels.shape})")
    if pixels.ndim not in (3, 4) or not (pixels.dtype == np.uint8 or pixels.dtype.kind == "f"):
        raise UserError(
            f"{shown(path)}: expected uint8 images in 3 dimensions, found {pixels.dtype} in "
            f"{pixels.ndim}"
        )
    return pixels if pixels.dtype == np.uint8 else pixels.astype(np.float32)


def once_per_node(world, shape, dtype, own, path):
    """The images of `path` in memory that the ranks of a node share. Collective.

    The first rank of each host reads, the others would only repeat it. Should two nodes go by one
    host name, the flag says that the second is still without, and its ranks read too: all of them
    write the same bytes. Where the node has no room to share, each rank has a copy to itself.
    """

    def read():
        mine = own()
        mine = checked_images(path) if mine is None else mine
        if mine.shape != shape:
            raise UserError(
                f"{shown(path)}: images of shape {mine.shape} on {world.host}, {shape} on "
                f"{world.hosts[0]}"
            )
        return mine

    if math.prod(shape) * np.dtype(dtype).itemsize > world.shared_room() // 2:
        return _together(world, read)
    pixels = world.shared_array(shape, np.dtype(dtype))
    there = world.shared_array((1,), np.uint8)

    def fill():
        if not there[0]:
            pixels[...] = read()
            there[0] = 1

    first = world.hosts.index(world.host) == world.rank
    _together(world, fill if first else lambda: None)
    _together(world, fill)
    return pixels


def _together(world, function):
    """function() on this rank; where any rank's raises UserError, all raise it."""
    result = error = None
    try:
        result = function()
    except UserError as e:
        error = e
    world.together(error)
    return result
