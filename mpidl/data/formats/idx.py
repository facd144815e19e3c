"""IDX files, plain or .gz: the form of MNIST, Fashion-MNIST and their kin."""

import gzip
import math
import os
import zlib

import numpy as np

from mpidl.data.datastore import ArrayDatastore, checked_labels
from mpidl.data.formats.format import format_of_parts
from mpidl.data.loading.node_memory import once_per_node
from mpidl.errors import UserError
from mpidl.text import printable

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MOST_DIMENSIONS = 8
DEFLATE_RATIO = 1032  # of bytes to compressed bytes, at most
PREFIX = {"train": "train", "test": "t10k"}


def read_idx(path):
    """The array in an IDX file, plain or .gz: magic number (0, 0, type, dimensions), sizes, values.

    UserError where the file is missing, damaged, or of another form.
    """
    try:
        packed = str(path).endswith(".gz")
        on_disk = os.stat(path).st_size
        with (gzip.open if packed else open)(path, "rb") as file:
            head = file.read(4 + 4 * MOST_DIMENSIONS)
            dtype, sizes, start = _header(head, path)
            expected = start + math.prod(sizes) * dtype.itemsize
            if expected > on_disk * DEFLATE_RATIO + 4096:  # no file of this size holds as much
                found = on_disk if not packed else f"{on_disk} compressed"
                raise UserError(_cut(path, expected, sizes, found, "cut short"))
            data = head + file.read(max(0, expected - len(head)))
            over = file.read(1)
    except FileNotFoundError:
        raise UserError(f"{printable(path)}: no such file") from None
    except (OSError, EOFError, MemoryError, zlib.error) as e:
        why = getattr(e, "strerror", None) or str(e) or type(e).__name__
        raise UserError(f"{printable(path)}: the file cannot be read: {why}") from None
    if len(data) != expected or over:
        found = on_disk if over and not packed else len(data) + len(over)
        problem = "too long" if len(data) > expected or over else "cut short"
        raise UserError(_cut(path, expected, sizes, found, problem))
    values = np.frombuffer(data, dtype, math.prod(sizes), start).reshape(sizes)
    return values.astype(dtype.newbyteorder("="), copy=False)


def _header(head, path):
    """(dtype, sizes, where the values begin) of the first bytes of an IDX file."""
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in TYPES or not head[3]:
        raise UserError(
            f"{printable(path)}: expected an IDX file, which begins with bytes 0, 0, type, "
            f"dimensions; found {list(head[:4])}"
        )
    if head[3] > MOST_DIMENSIONS:
        raise UserError(
            f"{printable(path)}: expected an IDX file of {MOST_DIMENSIONS} dimensions at most, "
            f"found {head[3]}"
        )
    start = 4 + 4 * head[3]
    if len(head) < start:
        raise UserError(
            f"{printable(path)}: expected all its sizes, found {len(head)}: the file is cut short"
        )
    sizes = [int.from_bytes(head[at : at + 4], "big") for at in range(4, start, 4)]
    if not math.prod(sizes):
        sizes = [sizes[0] if len(sizes) == 1 else 0] + [min(size, 1 << 16) for size in sizes[1:]]
    return np.dtype(TYPES[head[2]]), sizes, start


def _cut(path, expected, sizes, found, problem):
    return (
        f"{printable(path)}: expected {expected} bytes for its sizes {sizes}, found {found}: the "
        f"file is {problem}"
    )


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
        raise UserError(f'{printable(folder)}: which set must be "train" or "test", got {which!r}')

    def load():
        images, labels = (find(folder, which, kind) for kind in ("images", "labels"))
        for path, kind, wanted in ((images, "images", True), (labels, "labels", labelled)):
            if wanted and path is None:
                n = 3 if kind == "images" else 1
                raise UserError(
                    f"{printable(folder)}: expected {PREFIX[which]}-{kind}-idx{n}-ubyte, or .gz, "
                    "in this folder; found no such file"
                )
        pixels = checked_images(images)
        if labels is not None:
            labels = checked_labels(read_idx(labels), len(pixels), classes, printable(labels))
        return pixels, (images, labels)

    pixels, (path, labels) = once_per_node(world, load, folder)
    return ArrayDatastore(pixels, labels, classes, source=printable(path))


def checked_images(path):
    """The pixels of an IDX file of images; UserError where it holds something else."""
    pixels = read_idx(path)
    if not pixels.size:
        raise UserError(f"{printable(path)}: expected images, found none (sizes {pixels.shape})")
    if pixels.ndim not in (3, 4) or not (pixels.dtype == np.uint8 or pixels.dtype.kind == "f"):
        raise UserError(
            f"{printable(path)}: expected uint8 images in 3 dimensions, found {pixels.dtype} in "
            f"{pixels.ndim}"
        )
    with np.errstate(over="ignore"):  # an infinity is told of when it is read
        return pixels if pixels.dtype == np.uint8 else pixels.astype(np.float32)


FORMAT = format_of_parts(
    "idx",
    recognizes=lambda path, head, option: is_idx_folder(path),
    open_part=lambda path, part, world, options: idx_folder(
        path, part, world, classes=options.classes, labelled=options.labelled
    ),
    parts=lambda path: [part for part in PREFIX if is_idx_folder(path, part)],
)
