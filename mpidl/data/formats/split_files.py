"""Open folders with a training file and a test file, such as train.h5 and test.h5."""

from __future__ import annotations

import os

from mpidl.data.datastore import Datastore
from mpidl.data.formats.format import Format, OpenOptions, World, agreed_format, file_format
from mpidl.data.storage.paths import is_file
from mpidl.data.transforms.preprocess import AS_IT_IS
from mpidl.files import on_rank_0


def split_files(formats: tuple[Format, ...]) -> Format:
    """Make a Format for folders with a training file and an optional test file.

    Each of the two files may have any of the given `formats`.
    """
    suffixes = [suffix for fmt in formats for suffix in fmt.suffixes]

    def file_of_part(folder: str, part: str) -> str | None:
        paths = [os.path.join(folder, part + suffix) for suffix in suffixes]
        return next((path for path in paths if is_file(path)), None)

    def format_of(path: str, world: World, option: str) -> Format:
        return agreed_format(world, formats, lambda: file_format(path, option, formats))

    def open_data(
        folder: str, world: World, options: OpenOptions
    ) -> tuple[Datastore, Datastore | None]:
        train_path, test_path = on_rank_0(
            world, lambda: [file_of_part(folder, part) for part in ("train", "test")]
        )
        options = options._replace(preprocess=AS_IT_IS)
        train_format = format_of(train_path, world, options.option)
        train, _ = train_format.open_data(train_path, world, options)
        if test_path is None:
            return train, None
        test_format = format_of(test_path, world, options.option)
        options = options._replace(classes=train.classes)
        return train, test_format.open_test_data(test_path, world, options)

    def open_test_data(folder: str, world: World, options: OpenOptions) -> Datastore:
        path = on_rank_0(
            world, lambda: file_of_part(folder, "test") or file_of_part(folder, "train")
        )
        return format_of(path, world, options.option).open_test_data(path, world, options)

    def recognizes(path: str, head: bytes, option: str) -> bool:
        return file_of_part(path, "train") is not None

    return Format("train and test files", recognizes, open_data, open_test_data)
