"""Open folders with a file for each part, such as train.h5, val.h5 and test.h5."""

from __future__ import annotations

import os

from mpidl.data.datastore import Datastore
from mpidl.data.formats.format import (
    PART_NAMES,
    Format,
    OpenOptions,
    World,
    agreed_format,
    file_format,
    format_of_parts,
)
from mpidl.data.paths import is_file, scan
from mpidl.data.transforms.preprocess import AS_IT_IS
from mpidl.errors import UserError
from mpidl.files import on_rank_0
from mpidl.text import printable


def split_files(formats: tuple[Format, ...]) -> Format:
    """Make a Format for folders with a file of training images and files of the other parts.

    The files are named by part, such as train.h5, val.h5 and test.h5. Each of them may have any of
    the given `formats`.
    """
    suffixes = [suffix for fmt in formats for suffix in fmt.suffixes]

    def files_of_parts(folder: str) -> dict[str, str]:
        """Return {part: path} of the parts that exist."""
        paths: dict[str, str] = {}
        repeated = []
        for name in sorted(entry.name for entry in scan(folder)):
            stem, suffix = os.path.splitext(name)
            path, part = os.path.join(folder, name), PART_NAMES.get(stem.lower())
            if part is None or suffix not in suffixes or not is_file(path):
                continue
            if paths.setdefault(part, path) != path:
                repeated.append((paths[part], path))
        if repeated and "train" in paths:
            first, second = (printable(os.path.basename(path)) for path in repeated[0])
            raise UserError(
                f"{printable(folder)}: found {first} and {second}, which name the same part: keep "
                "one of them"
            )
        return paths

    def open_part(folder: str, part: str, world: World, options: OpenOptions) -> Datastore:
        path = on_rank_0(world, lambda: files_of_parts(folder)[part])
        file_type = agreed_format(
            world, formats, lambda: file_format(path, options.option, formats)
        )
        options = options._replace(preprocess=AS_IT_IS)
        if part == "train":
            return file_type.open_data(path, world, options)[0]
        return file_type.open_test_data(path, world, options)

    return format_of_parts(
        "train and test files",
        recognizes=lambda path, head, option: "train" in files_of_parts(path),
        open_part=open_part,
        parts=lambda path: list(files_of_parts(path)),
    )
