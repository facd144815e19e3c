"""Define the interface of data formats: recognize a path, and open its training and test set."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidl.data.datastore import Datastore
from mpidl.data.formats.image_files import SUFFIXES as IMAGE_SUFFIXES
from mpidl.data.paths import head, reading
from mpidl.data.transforms.preprocess import AS_IT_IS, Preprocess
from mpidl.errors import UserError
from mpidl.files import on_rank_0
from mpidl.text import printable

World = Any  # mpidl.comm.World or None; this package must not import mpidl.comm
HEAD_BYTES = 8  # number of leading bytes by which formats recognize a file
PARTS = ("train", "validation", "test")
# {name in a table or of a folder, in lower case: part}
PART_NAMES = {
    **{name: name for name in PARTS},
    **{"training": "train", "valid": "validation", "val": "validation", "testing": "test"},
}


def check_part(part: str, place: str | os.PathLike[str], parts: Sequence[str]) -> None:
    """Raise UserError unless a part is one of those that a format has."""
    if part not in parts:
        names = " or ".join(f'"{name}"' for name in parts)
        raise UserError(f"{printable(place)}: part must be {names}, got {part!r}")


def check_images(shape: Sequence[int], dtype: np.dtype, source: str) -> None:
    """Raise UserError unless an array in a file, of any layout, can hold images."""
    if dtype != np.uint8 and dtype.kind != "f":
        raise UserError(f"{source}: expected uint8 (pixels 0 to 255) or floats, found {dtype}")
    if len(shape) not in (3, 4):
        raise UserError(f"{source}: expected (n, C, H, W) or (n, H, W), found {tuple(shape)}")
    if not math.prod(shape):
        raise UserError(f"{source}: expected images, found none (shape {tuple(shape)})")


class OpenOptions(NamedTuple):
    """Options for opening a training or test set."""

    option: str = "--data"  # command-line option that named the path, for messages
    # Class names of the training set, to which labels are mapped. If None, the class names in
    # the data are used.
    classes: Sequence[str] | None = None
    labelled: bool = True  # whether labels are required
    # Conversion to apply to images during decoding. Formats that cannot do so ignore this
    # option.
    preprocess: Preprocess = AS_IT_IS


def no_validation_data(path: str, world: World, options: OpenOptions) -> Datastore | None:
    """Return None, the validation set in formats without such a part."""
    return None


class Format(NamedTuple):
    """A data format that `--data` and `--test-data` accept."""

    name: str
    # ``recognizes(path, head, option)`` returns whether the path has this format. `head` holds
    # the first `HEAD_BYTES` bytes of a file, and is empty for a folder. Called on rank 0 only.
    recognizes: Callable[[str, bytes, str], bool]
    # ``open_data(path, world, options)`` returns a tuple of the training set and the test set.
    # The test set is None if the data have no test set. Collective.
    open_data: Callable[[str, World, OpenOptions], tuple[Datastore, Datastore | None]]
    # ``open_test_data(path, world, options)`` returns one set for testing or prediction: the
    # test set, or else the validation set, or else all data. If `options.option` is
    # "--validation-data", the validation set comes first. Collective.
    open_test_data: Callable[[str, World, OpenOptions], Datastore]
    # Phrase that names a file of this format in messages, such as "an HDF5 file". If empty,
    # messages omit the format.
    noun: str = ""
    # File name suffixes of the training file and the test file in a folder.
    suffixes: tuple[str, ...] = ()
    # ``open_validation_data(path, world, options)`` returns the validation set of the data, or
    # None if the data have no validation set. Collective.
    open_validation_data: Callable[[str, World, OpenOptions], Datastore | None] = no_validation_data


def only_train(path: str) -> list[str]:
    """Return ["train"], the only part in formats without a test set."""
    return ["train"]


def format_of_parts(
    name: str,
    recognizes: Callable[[str, bytes, str], bool],
    open_part: Callable[[str, str, World, OpenOptions], Datastore],
    parts: Callable[[str], Sequence[str]] = only_train,
    noun: str = "",
    suffixes: tuple[str, ...] = (),
) -> Format:
    """Make a Format in which one path contains both the training set and the test set.

    `open_part(path, part, world, options)` opens one of the `PARTS` (collective), and `parts(path)`
    lists the parts that exist (on rank 0 only).
    """

    def open_data(path, world, options):
        train = open_part(path, "train", world, options)
        if "test" not in on_rank_0(world, lambda: parts(path)):
            return train, None
        return train, open_part(path, "test", world, options._replace(classes=train.classes))

    def open_test_data(path, world, options):
        names = on_rank_0(world, lambda: parts(path))
        return open_part(path, part_to_test(path, names, options), world, options)

    def open_validation_data(path, world, options):
        if "validation" not in on_rank_0(world, lambda: parts(path)):
            return None
        return open_part(path, "validation", world, options)

    return Format(name, recognizes, open_data, open_test_data, noun, suffixes, open_validation_data)


def opened_by(open_file: Callable[..., Datastore], name: str, **rest: Any) -> Format:
    """Make a Format of what `open_file(path, part=, world=, classes=, labelled=)` opens."""

    def open_part(path, part, world, options):
        keywords = {"classes": options.classes, "labelled": options.labelled}
        return open_file(path, part=part, world=world, **keywords)

    return format_of_parts(name, open_part=open_part, **rest)


def part_to_test(path: str, parts: Container[str], options: OpenOptions) -> str:
    """Return the part that `open_test_data` opens."""
    order = ("validation", "test") if options.option == "--validation-data" else ("test",)
    if options.option == "--test-data" and "test" not in parts and "validation" in parts:
        raise UserError(
            f"--test-data {printable(path)}: expected test images, found only training and "
            "validation images; name the images to test"
        )
    return next((part for part in (*order, "validation") if part in parts), "train")


def agreed_format(
    world: World, formats: Sequence[Format], recognize: Callable[[], Format]
) -> Format:
    """Call `recognize` on rank 0 and return the resulting Format on all ranks. Collective."""
    name = on_rank_0(world, lambda: recognize().name)
    return next(candidate for candidate in formats if candidate.name == name)


def file_format(path: str, option: str, formats: Iterable[Format]) -> Format:
    """Return the first format that recognizes a file.

    Raises UserError if the file cannot be read, or if no format recognizes the file.
    """
    formats = list(formats)
    with reading(path):
        start = head(path, HEAD_BYTES)
    for candidate in formats:
        if candidate.recognizes(path, start, option):
            return candidate
    *nouns, last = ["a folder", *(fmt.noun for fmt in formats if fmt.noun)]
    expected = f"{', '.join(nouns)} or {last}"
    hint = ""
    if path.endswith((".gz", ".tar", ".tgz", ".zip")):
        hint = "; unpack it first"
    elif path.lower().endswith(IMAGE_SUFFIXES):
        hint = "; to read an image, name the folder that contains it"
    raise UserError(
        f"{option} {printable(path)}: expected {expected}, found a file of another type{hint}"
    )
