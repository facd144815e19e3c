"""CIFAR-10 and CIFAR-100 in binary form: each image is one or two labels and 3 x 32 x 32 bytes.

Alex Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009;
https://www.cs.toronto.edu/~kriz/cifar.html describes the files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidl.data.datastore import ArrayDatastore
from mpidl.data.formats.format import World, format_of_parts
from mpidl.data.labels import align_labels
from mpidl.data.loading.node_memory import once_per_node
from mpidl.errors import UserError
from mpidl.files import unreadable
from mpidl.text import printable

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
# Files of the pickled versions for Python, which are never read.
PICKLED = ("data_batch_1", "test_batch", "batches.meta", "train", "test", "meta")


class Kind(NamedTuple):
    """One of the two data sets.

    Attributes
    ----------
    name : str
        "CIFAR-10" or "CIFAR-100".
    folder : str
        Folder that its archive unpacks to.
    train, test : tuple of str
        Names of its files.
    labels : dict
        Number of classes, and the file of their names, by label, in the order of a record's bytes.
    """

    name: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: dict[str, tuple[int, str]]

    @property
    def record_bytes(self) -> int:
        """Bytes of an image with its labels."""
        return len(self.labels) + PIXELS


KINDS = (
    Kind(
        "CIFAR-10",
        "cifar-10-batches-bin",
        tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        ("test_batch.bin",),
        {"fine": (10, "batches.meta.txt")},
    ),
    Kind(
        "CIFAR-100",
        "cifar-100-binary",
        ("train.bin",),
        ("test.bin",),
        {"coarse": (20, "coarse_label_names.txt"), "fine": (100, "fine_label_names.txt")},
    ),
)


def find_files(
    folder: str, part: str | None = None
) -> tuple[str, Kind, dict[str, list[str]]] | None:
    """Find CIFAR's files in a folder, or in the sub-folder that the archive unpacks to.

    Parameters
    ----------
    folder : str
        Where to look.
    part : {"train", "test"}, optional
        Part that must exist; without it, either part will do.

    Returns
    -------
    tuple or None
        The folder of the files, their Kind, and the paths that exist, by part; None if there are
        none.
    """
    for kind in KINDS:
        for root in (folder, os.path.join(folder, kind.folder)):
            files = {}
            for key, names in (("train", kind.train), ("test", kind.test)):
                paths = [os.path.join(root, name) for name in names]
                files[key] = [path for path in paths if os.path.isfile(path)]
            if files[part] if part else any(files.values()):
                return root, kind, files
    return None


def refuse_pickles(folder: str, option: str = "--data") -> None:
    """Raise UserError if a folder holds CIFAR as Python pickles."""
    for root in (
        folder,
        *(os.path.join(folder, f"cifar-{n}") for n in ("10-batches-py", "100-python")),
    ):
        pickled = [name for name in PICKLED if os.path.isfile(os.path.join(root, name))]
        if len(pickled) >= 2:
            raise UserError(
                f"{option} {printable(folder)}: found {pickled[0]}, CIFAR as Python pickles, which "
                "are never read, as they may run any program: expected the binary version "
                "(cifar-10-binary.tar.gz, cifar-100-binary.tar.gz)"
            )


def cifar_folder(
    folder: str | os.PathLike[str],
    part: str = "train",
    world: World = None,
    *,
    labels: str = "fine",
    classes: Sequence[str] | None = None,
) -> ArrayDatastore:
    """Open the training or test images of CIFAR-10 or CIFAR-100. Collective with a world.

    Parameters
    ----------
    folder : path-like
        Folder of the binary files, or the one that contains their folder.
    part : {"train", "test"}
        data_batch_*.bin or train.bin; test_batch.bin or test.bin.
    world : World, optional
        The ranks that open the files. The pixels lie in memory once per node.
    labels : {"fine", "coarse"}
        Which labels to take; only CIFAR-100 has coarse ones.
    classes : sequence of str, optional
        Class names to map the labels to. By default those of the file of names, or numbers if
        there is no such file.

    Raises
    ------
    UserError
        A file is missing, cut short or damaged, or a label belongs to none of the classes.
    """
    if part not in ("train", "test"):
        raise UserError(f'{printable(folder)}: part must be "train" or "test", got {part!r}')
    folder = os.fspath(folder)

    def load():
        files = find_files(folder, part)
        if files is None:
            expected = " or ".join(getattr(kind, part)[0] for kind in KINDS)
            raise UserError(f"{printable(folder)}: expected {expected}; found no such file")
        root, kind, paths = files
        if labels not in kind.labels:
            expected = " or ".join(f'"{name}"' for name in kind.labels)
            raise UserError(
                f"{printable(root)}: labels of {kind.name}: expected {expected}, got {labels!r}"
            )
        missing = [n for n in getattr(kind, part) if os.path.join(root, n) not in paths[part]]
        if missing:
            raise UserError(
                f"{printable(root)}: expected {missing[0]} beside the others; it is missing"
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
    """Return the records of a file, uint8 (n, labels + 3072); UserError if it is damaged."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size or size % kind.record_bytes:
                raise UserError(
                    f"{printable(path)}: expected records of {kind.record_bytes} bytes "
                    f"({kind.name}), found {size} bytes: the file is cut short, or no such file"
                )
            data = file.read(size)
    except (OSError, MemoryError) as e:
        raise unreadable(path, e) from None
    if len(data) != size:
        raise UserError(f"{printable(path)}: expected {size} bytes, found {len(data)}")
    records = np.frombuffer(data, np.uint8).reshape(-1, kind.record_bytes)
    for column, (name, (count, _)) in enumerate(kind.labels.items()):
        invalid = np.nonzero(records[:, column] >= count)[0]
        if len(invalid):
            raise UserError(
                f"{printable(path)}: image {invalid[0]}: expected a {name} label below {count}, "
                f"found {records[invalid[0], column]}"
            )
    return records


def read_names(path: str, count: int) -> list[str]:
    """Return the class names in a text file, a line each; numbers if there is no such file."""
    if not os.path.isfile(path):
        return [str(i) for i in range(count)]
    try:
        with open(path, "rb") as file:
            text = file.read(1 << 16).decode("utf-8", "replace")
    except OSError as e:
        raise unreadable(path, e) from None
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if len(names) != count or len(set(names)) != count:
        raise UserError(
            f"{printable(path)}: expected {count} different class names, a line each, found "
            f"{len(set(names))}"
        )
    return names


def _recognizes(path: str, head: bytes, option: str) -> bool:
    """Tell whether a folder holds CIFAR's binary files; UserError if it holds the pickled ones."""
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
    parts=lambda path: [part for part in ("train", "test") if find_files(path, part) is not None],
)
