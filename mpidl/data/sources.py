"""What `--data` and `--test-data` say: the digit set by name, or a folder by what it holds."""

import os

from mpidl.data import idx
from mpidl.data.datastore import on_rank_0, shown
from mpidl.data.digits import digits
from mpidl.data.folder import (
    ImageFolder,
    check_folder,
    file_of_image,
    sub_folders,
    visible,
)
from mpidl.errors import UserError

TEST_FOLDERS = ("test", "val", "valid", "validation")


def open_data(text, world=None, option="--data"):
    """(training set, its own test set or None) of what `--data` says. Collective.

    "digits" is the embedded digit set; else a folder: of IDX files (train-* and t10k-*), of
    train/ and test/ with class sub-folders in both, or of class sub-folders.
    """
    if text == "digits":
        return digits(world), None
    kind = on_rank_0(world, lambda: kind_of(text, option))
    if kind == "idx":
        train = idx.idx_folder(text, "train", world)
        if not on_rank_0(world, lambda: idx.is_idx_folder(text, "test")):
            return train, None
        return train, idx.idx_folder(text, "test", world, classes=train.classes)
    if kind == "train+test":
        train = ImageFolder(os.path.join(text, "train"), world)
        return train, ImageFolder(os.path.join(text, "test"), world, classes=train.classes)
    return ImageFolder(text, world), None


def open_test_data(text, world=None, *, classes=None, labelled=True, option="--test-data"):
    """One set to test or predict on: the test part of what has one, else all of it. Collective.

    classes: those of the set trained on, which the labels must count by. labelled=False accepts
    images without labels, as prediction does.
    """
    if text == "digits":
        found = digits(world)
        if classes is not None and list(classes) != found.classes:
            raise UserError(
                f"{option} digits: expected the classes {', '.join(shown(c) for c in classes)}, "
                f"found {', '.join(found.classes)}"
            )
        return found
    kind = on_rank_0(world, lambda: kind_of(text, option))
    if kind == "idx":
        which = "test" if on_rank_0(world, lambda: idx.is_idx_folder(text, "test")) else "train"
        return idx.idx_folder(text, which, world, classes=classes, labelled=labelled)
    folder = os.path.join(text, "test") if kind == "train+test" else text
    return ImageFolder(folder, world, classes=classes, labelled=labelled)


def kind_of(folder, option):
    """ "idx", "train+test", or "classes": what a folder holds. UserError where it is no folder."""
    check_folder(folder, option)
    if idx.is_idx_folder(folder):
        return "idx"
    # A class may be called "train": only a folder with nothing but such names is a split set.
    names = sub_folders(folder)
    if "train" in names and set(names) <= {"train", *TEST_FOLDERS}:
        train = os.path.join(folder, "train")
        if sub_folders(train) and not any(file_of_image(e) for e in visible(train)):
            if "test" in names:
                return "train+test"
            others = f" and --test-data {shown(folder)}/{names[-1]}" if len(names) > 1 else ""
            raise UserError(
                f"{option} {shown(folder)}: found train/ but no test/ beside it; name the "
                f"folders themselves: --data {shown(train)}{others}"
            )
    return "classes"
