"""Read CIFAR-10 and CIFAR-100 in the binary version.

A record consists of one label (CIFAR-10) or two labels (CIFAR-100), and 3 x 32 x 32 bytes of
pixels. Source: Alex Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The
files are described at https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidl.data.array_datastore import ArrayDatastore
from mpidl.data.formats.format import World, check_part, format_of_parts
from mpidl.data.labels import align_labels
from mpidl.data.loading.node_memory import once_per_node
from mpidl.data.paths import is_file, open_binary, reading, stamp_of
from mpidl.errors import UserError
from mpidl.text import printable

PARTS = ("train", "test")
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
# Names of the files of the Python version. These files are pickles and are never read.
PICKLED = ("data_batch_1", "test_batch", "batches.meta", "train", "test", "meta")


class Kind(NamedTuple):
    """Description of one of the two data sets."""

    name: str  # "CIFAR-10" or "CIFAR-100"
    folder: str  # name of the folder in the downloaded archive
    files: dict[str, tuple[str, ...]]  # {part: names of its files}
    # {kind of label: (number of classes, file of class names)}, in the order of the label bytes
    # of a record.
    labels: dict[str, tuple[int, str]]

    @property
    def record_bytes(self) -> int:
        """Size of a record (the labels and pixels of an image) in bytes."""
        return len(self.labels) + PIXELS


KINDS = (
    Kind(
        "CIFAR-10",
        "cifar-10-batches-bin",
        {
            "train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
            "test": ("test_batch.bin",),
        },
        {"fine": (10, "batches.meta.txt")},
    ),
    Kind(
        "CIFAR-100",
        "cifar-100-binary",
        {"train": ("train.bin",), "test": ("test.bin",)},
        {"coarse": (20, "coarse_label_names.txt"), "fine": (100, "fine_label_names.txt")},
    ),
)


def find_files(
    folder: str, part: str | None = None
) -> tuple[str, Kind, dict[str, list[str]]] | None:
    """Find CIFAR's binary files in a folder, or in the sub-folder that the archive contains.

    Return the folder of the files, the Kind and {part: existing paths}, or None if there are no
    files. `part` must exist; by default, either part suffices.
    """
    for kind in KINDS:
        for root in (folder, os.path.join(folder, kind.folder)):
            files = {
                key: [path for name in names if is_file(path := os.path.join(root, name))]
                for key, names in kind.files.items()
            }
            if files[part] if part else any(files.values()):
                return root, kind, files
    return None


def refuse_pickles(folder: str, option: str = "--data") -> None:
    """Raise UserError if a folder holds CIFAR as Python pickles."""
    for root in (
        folder,
        *(os.path.join(folder, f"cifar-{n}") for n in ("10-batches-py", "100-python")),
    ):
        pickled = [name for name in PICKLED if is_file(os.path.join(root, name))]
        if len(pickled) >= 2:
            raise UserError(
                f"{option} {printable(folder)}: found {pickled[0]}, the Python version of CIFAR, "
                "whose pickles are never read because they can run arbitrary code: expected the "
                "binary version (cifar-10-binary.tar.gz, cifar-100-binary.tar.gz)"
            )


def cifar_folder(
    folder: str | os.PathLike[str],
    part: str = "train",
    world: World = None,
    *,
    labels: str = "fine",
    classes: Sequence[str] | None = None,
) -> ArrayDatastore:
    """Open the training or test images of CIFAR-10 or CIFAR-100.

    With a world, the call is collective.

    Parameters
    ----------
    folder : path-like
        Folder of the binary files, or the parent of this folder.
    part : {"train", "test"}
        Part to open: `data_batch_*.bin` or `train.bin` for "train", `test_batch.bin` or
        `test.bin` for "test".
    world : World, optional
        The ranks that open the files together. The ranks of a node share one copy of the pixels.
    labels : {"fine", "coarse"}
        Kind of labels to use. Only CIFAR-100 has coarse labels.
    classes : sequence of str, optional
        Class names to which the labels are mapped. By default, the names are read from the file of
        class names. Without this file, they are "0", "1", ...

    Returns
    -------
    ArrayDatastore
        The images.

    Raises
    ------
    UserError
        If a file is missing, truncated or damaged, or if the class of a label is not among
        `classes`.
    """
    check_part(part, folder, PARTS)
    folder = os.fspath(folder)

    def load():
        files = find_files(folder, part)
        if files is None:
            expected = " or ".join(kind.files[part][0] for kind in KINDS)
            raise UserError(f"{printable(folder)}: expected {expected}; found no such file")
        root, kind, paths = files
        if labels not in kind.labels:
            expected = " or ".join(f'"{name}"' for name in kind.labels)
            raise UserError(
                f"{printable(root)}: labels of {kind.name}: expected {expected}, got {labels!r}"
            )
        missing = [n for n in kind.files[part] if os.path.join(root, n) not in paths[part]]
        if missing:
            raise UserError(
                f"{printable(root)}: expected {missing[0]} in addition to the other files; it is "
                "missing"
            )
        records = [read_records(path, kind) for path in paths[part]]
        pixels = np.concatenate([rows[:, len(kind.labels) :] for rows in records])
        column = list(kind.labels).index(labels)
        codes = np.concatenate([rows[:, column] for rows in records])
        count, name = kind.labels[labels]
        names = read_names(os.path.join(root, name), count)
        codes, names = align_labels(codes, names, classes, printable(root))
        return pixels.reshape(-1, *SHAPE), (f"{root}, {kind.name} {part}", codes, names)

    pixels, (source, codes, names) = once_per_node(world, load, folder)
    return ArrayDatastore(pixels, codes, names, source=printable(source))


def read_records(path: str, kind: Kind) -> np.ndarray:
    """Read the records of a file as uint8 (n, number of labels + 3072).

    Raises UserError if the file is truncated, or if a label is not below the number of classes.
    """
    with reading(path), open_binary(path) as file:
        size = stamp_of(path).size
        if not size or size % kind.record_bytes:
            raise UserError(
                f"{printable(path)}: expected records of {kind.record_bytes} bytes "
                f"({kind.name}), found {size} bytes: the file is truncated or not CIFAR"
            )
        data = file.read(size)
    records = np.frombuffer(data, np.uint8).reshape(-1, kind.record_bytes)
    for labels, (name, (count, _)) in zip(records.T, kind.labels.items(), strict=False):
        if labels.max() >= count:
            i = int((labels >= count).argmax())
            raise UserError(
                f"{printable(path)}: image {i}: expected a {name} label below {count}, found "
                f"{labels[i]}"
            )
    return records


def read_names(path: str, count: int) -> list[str]:
    """Read `count` class names from a text file with one name per line.

    If the file does not exist, return the names "0", "1", ...
    """
    if not is_file(path):
        return [str(i) for i in range(count)]
    with reading(path), open_binary(path) as file:
        text = file.read(1 << 16).decode("utf-8", "replace")
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if len(names) != count or len(set(names)) != count:
        raise UserError(
            f"{printable(path)}: expected {count} different class names, one per line, found "
            f"{len(set(names))}"
        )
    return names


def _recognizes(path: str, head: bytes, option: str) -> bool:
    """Return whether a folder holds CIFAR's binary files; raise UserError if it holds pickles."""
    if find_files(path) is not None:
        return True
    refuse_pickles(path, option)
    return False


FORMAT = format_of_parts(
    "cifar",
    recognizes=_recognizes,
    open_part=lambda path, part, world, options: cifar_folder(
        path, part, world, classes=options.classes
    ),
    parts=lambda path: [part for part in PARTS if find_files(path, part) is not None],
)
