"""Open what `--data` and `--test-data` name: a format by its name, or a file or folder."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mpidl.data.datastore import Datastore
from mpidl.data.formats import FILES, FOLDERS, FORMATS, KEYWORDS
from mpidl.data.formats.folder import check_folder
from mpidl.data.formats.format import Format, OpenOptions, World, agreed_format, file_format
from mpidl.data.transforms.preprocess import AS_IT_IS, Preprocess, preprocessed
from mpidl.errors import UserError


def open_data(
    text: str,
    world: World = None,
    option: str = "--data",
    preprocess: Preprocess = AS_IT_IS,
) -> tuple[Datastore, Datastore | None]:
    """Open the training set, and its own test set, that `--data` names. Collective.

    Parameters
    ----------
    text : str
        "digits", the embedded digit set; or a folder or file, which may be

        - a folder of IDX files (train-* and t10k-*),
        - a folder of CIFAR's binary files,
        - a folder with a training file and a test file (train.h5 and test.h5, or another format),
        - a folder with train/ and test/, both with class sub-folders,
        - a folder of class sub-folders,
        - a packed file, an HDF5 file, a .mat file (XTrain, XTest), or an .npz file.
    world : World, optional
        The ranks that open the data; without it, this process alone.
    option : str
        Command-line option that named the data, for messages.
    preprocess : Preprocess
        Size and colour to bring the images to.

    Returns
    -------
    train : Datastore
    test : Datastore or None
        The data's own test set, if it has one.

    Raises
    ------
    UserError
        No format recognizes the path, or its content is unusable.
    """
    options = OpenOptions(option, preprocess=preprocess)
    train, test = _format_of(text, world, option).open_data(text, world, options)
    return _converted(train, preprocess), test and _converted(test, preprocess)


def open_test_data(
    text: str,
    world: World = None,
    *,
    classes: Sequence[str] | None = None,
    labelled: bool = True,
    option: str = "--test-data",
) -> Datastore:
    """Open one set to test or predict on: the test part of the data, or all of it. Collective.

    Parameters
    ----------
    text : str
        What the data is, as for `open_data`.
    world : World, optional
        The ranks that open the data; without it, this process alone.
    classes : sequence of str, optional
        Class names of the training set, which the labels must count by.
    labelled : bool
        False accepts images without labels, for prediction.
    option : str
        Command-line option that named the data, for messages.

    Raises
    ------
    UserError
        No format recognizes the path, or its content is unusable.
    """
    options = OpenOptions(option, classes, labelled)
    return _format_of(text, world, option).open_test_data(text, world, options)


def _format_of(text: str, world: World, option: str) -> Format:
    """Return the Format of a path. Collective."""
    for candidate in KEYWORDS:
        if text == candidate.name:
            return candidate
    return agreed_format(world, FORMATS, lambda: _recognized(text, option))


def _recognized(path: str, option: str) -> Format:
    """Return the first Format that recognizes a path; UserError if it is missing or unknown."""
    if os.path.isfile(path):
        return file_format(path, option, FILES)
    check_folder(path, option)
    return next(candidate for candidate in FOLDERS if candidate.recognizes(path, b"", option))


def _converted(store: Datastore, preprocess: Preprocess) -> Datastore:
    """Return the same images after a Preprocess; UserError if they are no gray or RGB bytes."""
    if preprocess == AS_IT_IS:
        return store
    if store.dtype != "uint8" or store.image_shape[0] not in (1, 3):
        raise UserError(
            f"{store.describe()}: expected gray or RGB images of bytes to resize or convert, found "
            f"{store.dtype} in {store.image_shape[0]} channel(s)"
        )
    return preprocessed(store, preprocess)
