"""Open the data that `--data` and `--test-data` name: a file, a folder, "digits" or "cells"."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import NamedTuple

from mpidl.data.datastore import Datastore
from mpidl.data.formats.format import Format, OpenOptions, World, agreed_format, file_format
from mpidl.data.paths import is_file, listed
from mpidl.data.transforms.preprocess import AS_IT_IS, Preprocess, preprocessed
from mpidl.data.urls import check_url
from mpidl.errors import UserError

KEYWORDS = ("digits", "cells")  # modules of the formats that `--data` selects by name, not by path


class Sets(NamedTuple):
    """The sets of a path. `validation` and `test` are None if the data have no such part."""

    train: Datastore
    validation: Datastore | None
    test: Datastore | None


def open_data(
    text: str,
    world: World = None,
    option: str = "--data",
    preprocess: Preprocess = AS_IT_IS,
) -> tuple[Datastore, Datastore | None]:
    """Open the training set that `--data` names, and the test set if there is one. Collective.

    Parameters
    ----------
    text : str
        "digits" or "cells" for an embedded set, or the path of one of the following:

        - a folder of IDX files (train-* and t10k-*),
        - a folder of CIFAR-10 or CIFAR-100 in the binary version,
        - a folder with a file for each part (train.h5 and test.h5, or another format),
        - a folder with the sub-folders train/ and test/, each with one sub-folder per class. A
          sub-folder validation/, val/ or valid/ is opened by `open_validation_data`,
        - a folder with one sub-folder per class,
        - a packed file, an HDF5 file, a .mat file (XTrain, XTest), an .npz file, or a .csv table.
    world : World, optional
        The ranks that open the data together. By default, only this rank opens the data.
    option : str
        Command-line option that named the data, for messages.
    preprocess : Preprocess
        Conversion to apply to the images of both sets.

    Returns
    -------
    train : Datastore
        The training set.
    test : Datastore or None
        The test set, or None if the data have no test part.

    Raises
    ------
    UserError
        If no format recognizes the path, or if the data are damaged or invalid.
    """
    sets = open_sets(text, world, option, preprocess, validation=False)
    return sets.train, sets.test


def open_sets(
    text: str,
    world: World = None,
    option: str = "--data",
    preprocess: Preprocess = AS_IT_IS,
    *,
    validation: bool = True,
    labelled_validation: bool = True,
) -> Sets:
    """Open all sets that the data contain; see `open_data`. Collective.

    If `validation` is False, the validation set is not opened. If `labelled_validation` is False,
    its labels need not be those of the training set.
    """
    options = OpenOptions(option, preprocess=preprocess)
    check_url(text, option)
    with listed(text):
        opened = _format_of(text, world, option)
        train, test = opened.open_data(text, world, options)
        options, held_out = options._replace(classes=train.classes), None
        if validation:
            options = options._replace(labelled=labelled_validation)
            held_out = opened.open_validation_data(text, world, options)
    held_out, test = (store and _converted(store, preprocess) for store in (held_out, test))
    return Sets(_converted(train, preprocess), held_out, test)


def open_test_data(
    text: str,
    world: World = None,
    *,
    classes: Sequence[str] | None = None,
    labelled: bool = True,
    option: str = "--test-data",
) -> Datastore:
    """Open one set for testing or prediction. Collective.

    If the data have a test part or a validation part, only one of them is opened: for
    "--validation-data" rather the validation part, and otherwise rather the test part.

    Parameters
    ----------
    text, world, option
        As for `open_data`.
    classes : sequence of str, optional
        Class names of the training set, to which the labels are mapped.
    labelled : bool
        Whether labels are required. Prediction does not need them.

    Returns
    -------
    Datastore
        The set.

    Raises
    ------
    UserError
        As for `open_data`.
    """
    options = OpenOptions(option, classes, labelled)
    check_url(text, option)
    with listed(text):
        return _format_of(text, world, option).open_test_data(text, world, options)


def open_validation_data(
    text: str,
    world: World = None,
    *,
    classes: Sequence[str] | None = None,
    option: str = "--data",
    preprocess: Preprocess = AS_IT_IS,
) -> Datastore | None:
    """Open the validation part of the data, such as the folder val/. Collective.

    Parameters
    ----------
    text, world, option, preprocess
        As for `open_data`.
    classes : sequence of str, optional
        Class names of the training set, to which the labels are mapped.

    Returns
    -------
    Datastore or None
        The validation set, or None if the data contain no validation part.
    """
    options = OpenOptions(option, classes, preprocess=preprocess)
    with listed(text):
        store = _format_of(text, world, option).open_validation_data(text, world, options)
    return store and _converted(store, preprocess)


def _format_of(text: str, world: World, option: str) -> Format:
    """Return the Format of the data that `text` names. Collective."""
    if text in KEYWORDS:
        return importlib.import_module(f"mpidl.data.formats.{text}").FORMAT
    from mpidl.data.formats.path_formats import FORMATS  # only runs that read a path need them

    return agreed_format(world, FORMATS, lambda: _recognized(text, option))


def _recognized(path: str, option: str) -> Format:
    """Return the first Format that recognizes a path.

    Raises UserError if the path does not exist, or if no format recognizes it.
    """
    from mpidl.data.formats.folder import check_folder
    from mpidl.data.formats.path_formats import FILES, FOLDERS

    if is_file(path):
        return file_format(path, option, FILES)
    check_folder(path, option)
    return next(candidate for candidate in FOLDERS if candidate.recognizes(path, b"", option))


def _converted(store: Datastore, preprocess: Preprocess) -> Datastore:
    """Apply a Preprocess to the images of a datastore.

    Raises UserError if the images are not uint8 gray or RGB images.
    """
    if preprocess == AS_IT_IS:
        return store
    if store.dtype != "uint8" or store.image_shape[0] not in (1, 3):
        raise UserError(
            f"{store.describe()}: expected gray or RGB images of uint8 to resize or convert, found "
            f"{store.dtype} in {store.image_shape[0]} channel(s)"
        )
    return preprocessed(store, preprocess)
