"""CIFAR-10 and CIFAR-100 in their binary form: a label or two, then 3 x 32 x 32 bytes, an image.

Alex Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009;
https://www.cs.toronto.edu/~kriz/cifar.html describes the files.
"""

import os
from typing import NamedTuple

import numpy as np

from mpidl.data.datastore import ArrayDatastore
from mpidl.data.formats.format import format_of_parts
from mpidl.data.labels import align_labels
from mpidl.data.loading.node_memory import once_per_node
from mpidl.errors import UserError
from mpidl.files import unreadable
from mpidl.text import printable

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
# Of the pickled versions for Python: no such file is ever read.
PICKLED = ("data_batch_1", "test_batch", "batches.meta", "train", "test", "meta")


class Kind(NamedTuple):
    """One of the two sets: its files, and of each of its labels the classes and their names' file.

    folder: what its archive unpacks to.
    """

    name: str
    folder: str
    train: tuple
    test: tuple
    labels: dict  # in the order of the bytes of a record

    @property
    def record(self):
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


def find(folder, which=None):
    """(folder of the files, Kind, {"train": paths, "test": paths}), or None where there are none.

    The files may lie in the sub-folder that the archive unpacks to. which: "train" or "test" must
    be there; else one of the two.
    """
    for kind in KINDS:
        for place in (folder, os.path.join(folder, kind.folder)):
            parts = {}
            for part, names in (("train", kind.train), ("test", kind.test)):
                paths = [os.path.join(place, name) for name in names]
                parts[part] = [path for path in paths if os.path.isfile(path)]
            if parts[which] if which else any(parts.values()):
                return place, kind, parts
    return None


def refuse_pickles(folder, option="--data"):
    """A UserError where the folder holds CIFAR as Python pickles."""
    for place in (
        folder,
        *(os.path.join(folder, f"cifar-{n}") for n in ("10-batches-py", "100-python")),
    ):
        pickled = [name for name in PICKLED if os.path.isfile(os.path.join(place, name))]
        if len(pickled) >= 2:
            raise UserError(
                f"{option} {printable(folder)}: found {pickled[0]}, CIFAR as Python pickles, which "
                "are never read, as they may run any program: expected the binary version "
                "(cifar-10-binary.tar.gz, cifar-100-binary.tar.gz)"
            )


def cifar_folder(folder, which="train", world=None, *, labels="fine", classes=None):
    """The training or test images of CIFAR-10 or CIFAR-100, as an ArrayDatastore.

    which: "train" (data_batch_*.bin, train.bin) or "test" (test_batch.bin, test.bin). labels:
    "fine", or of CIFAR-100 "coarse". classes: names that labels are brought to, those of the file
    of names where not given (numbers where there is no such file). With a world it is collective,
    and the pixels lie in memory once per node.
    """
    if which not in ("train", "test"):
        raise UserError(f'{printable(folder)}: which set must be "train" or "test", got {which!r}')

    def load():
        found = find(folder, which)
        if found is None:
            names = " or ".join(getattr(kind, which)[0] for kind in KINDS)
            raise UserError(f"{printable(folder)}: expected {names}; found no such file")
        place, kind, parts = found
        if labels not in kind.labels:
            known = " or ".join(f'"{name}"' for name in kind.labels)
            raise UserError(
                f"{printable(place)}: labels of {kind.name}: expected {known}, got {labels!r}"
            )
        missing = [n for n in getattr(kind, which) if os.path.join(place, n) not in parts[which]]
        if missing:
            raise UserError(
                f"{printable(place)}: expected {missing[0]} beside the others; it is missing"
            )
        records = [read_records(path, kind) for path in parts[which]]
        pixels = np.concatenate([part[:, len(kind.labels) :] for part in records])
        column = list(kind.labels).index(labels)
        codes = np.concatenate([part[:, column] for part in records])
        count, name = kind.labels[labels]
        names = read_names(os.path.join(place, name), count)
        codes, known = align_labels(codes, names, classes, printable(place))
        return pixels.reshape(-1, *SHAPE), (f"{place}, {kind.name} {which}", codes, known)

    pixels, (source, codes, known) = once_per_node(world, load, folder)
    return ArrayDatastore(pixels, codes, known, source=printable(source))


def read_records(path, kind):
    """The records of a file, uint8 (n, labels + 3072); UserError where they are not whole."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size or size % kind.record:
                raise UserError(
                    f"{printable(path)}: expected records of {kind.record} bytes ({kind.name}), "
                    f"found {size} bytes: the file is cut short, or no such file"
                )
            data = file.read(size)
    except (OSError, MemoryError) as e:
        raise unreadable(path, e) from None
    if len(data) != size:
        raise UserError(f"{printable(path)}: expected {size} bytes, found {len(data)}")
    records = np.frombuffer(data, np.uint8).reshape(-1, kind.record)
    for column, (name, (count, _)) in enumerate(kind.labels.items()):
        wrong = np.nonzero(records[:, column] >= count)[0]
        if len(wrong):
            raise UserError(
                f"{printable(path)}: image {wrong[0]}: expected a {name} label below {count}, "
                f"found {records[wrong[0], column]}"
            )
    return records


def read_names(path, count):
    """The class names in a text file, a line each; numbers where there is no such file."""
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
    if find(path) is not None:
        return True
    refuse_pickles(path, option)
    return False


FORMAT = format_of_parts(
    "cifar",
    recognizes=_recognizes,
    open_part=lambda path, part, world, options: cifar_folder(
        path, part, world, classes=options.classes
    ),
    parts=lambda path: [part for part in ("train", "test") if find(path, part) is not None],
)
