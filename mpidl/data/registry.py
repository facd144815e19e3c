"""What `--data` and `--test-data` say: the digit set by name, a folder or file by its content."""

import os

from mpidl.data.formats import cifar, idx, mat, packed
from mpidl.data.formats.digits import digits
from mpidl.data.formats.folder import ImageFolder, check_folder, file_of_image, sub_folders, visible
from mpidl.data.formats.hdf5 import HDF5Datastore
from mpidl.data.transforms.preprocess import AS_IT_IS, preprocessed
from mpidl.errors import UserError
from mpidl.files import on_rank_0, unreadable
from mpidl.text import printable

TEST_FOLDERS = ("test", "val", "valid", "validation")
FILES = (".h5", ".hdf5", ".mat")  # of a folder with train.h5 and test.h5, say
SIGNATURE = b"\x89HDF\r\n\x1a\n"  # of HDF5
KNOWN = "a folder, an HDF5 file or a .mat file"


def open_data(text, world=None, option="--data", wanted=AS_IT_IS):
    """(training set, its own test set or None) of what `--data` says. Collective.

    "digits" is the embedded digit set; else a folder: of IDX files (train-* and t10k-*), of CIFAR's
    binary files, of train/ and test/ with class sub-folders in both, of train.h5 and test.h5 (or
    .mat), or of class sub-folders; else a file: packed, HDF5, or .mat (XTrain, XTest).
    wanted: the `Preprocess` to bring images to.
    """
    kind = "digits" if text == "digits" else on_rank_0(world, lambda: kind_of(text, option))
    if kind == "train+test":
        train = ImageFolder(os.path.join(text, "train"), world, preprocess=wanted)
        folder = os.path.join(text, "test")
        return train, ImageFolder(folder, world, classes=train.classes, preprocess=wanted)
    if kind == "classes":
        return ImageFolder(text, world, preprocess=wanted), None
    if kind == "files":
        paths = on_rank_0(world, lambda: {p: file_of_part(text, p) for p in ("train", "test")})
        train = open_data(paths["train"], world, option)[0]  # as it is: see the last line
        test = None
        if paths["test"] is not None:
            test = open_test_data(paths["test"], world, classes=train.classes, option=option)
    else:
        train = _one(kind, text, "train", world, None, True)
        parts = on_rank_0(world, lambda: parts_of(kind, text))
        test = _one(kind, text, "test", world, train.classes, True) if "test" in parts else None
    return _remade(train, wanted), test and _remade(test, wanted)


def open_test_data(text, world=None, *, classes=None, labelled=True, option="--test-data"):
    """One set to test or predict on: the test part of what has one, else all of it. Collective.

    classes: those of the set trained on, which the labels must count by. labelled=False accepts
    images without labels, as prediction does.
    """
    if text == "digits":
        found = digits(world)
        if classes is not None and list(classes) != found.classes:
            raise UserError(
                f"{option} digits: expected the classes {', '.join(map(printable, classes))}, "
                f"found {', '.join(found.classes)}"
            )
        return found
    kind = on_rank_0(world, lambda: kind_of(text, option))
    if kind in ("train+test", "classes"):
        folder = os.path.join(text, "test") if kind == "train+test" else text
        return ImageFolder(folder, world, classes=classes, labelled=labelled)
    if kind == "files":
        path = on_rank_0(world, lambda: file_of_part(text, "test") or file_of_part(text, "train"))
        return open_test_data(path, world, classes=classes, labelled=labelled, option=option)
    parts = on_rank_0(world, lambda: parts_of(kind, text))
    return _one(kind, text, "test" if "test" in parts else "train", world, classes, labelled)


def _one(kind, text, part, world, classes, labelled):
    """A part of the data that a path of this kind holds."""
    if kind == "digits":
        return digits(world)
    if kind == "idx":
        return idx.idx_folder(text, part, world, classes=classes, labelled=labelled)
    if kind == "cifar":
        return cifar.cifar_folder(text, part, world, classes=classes)
    if kind == "packed":
        return packed.PackedDatastore(text, world, part, classes=classes, labelled=labelled)
    if kind == "mat":
        return mat.mat_file(text, world, part, classes=classes, labelled=labelled)
    return HDF5Datastore(text, world, classes=classes, labelled=labelled)


def parts_of(kind, text):
    """Which of "train" and "test" are in what is there. On rank 0."""
    if kind == "packed":
        return packed.parts_of(text)
    has = {
        "idx": lambda part: idx.is_idx_folder(text, part),
        "cifar": lambda part: cifar.find(text, part) is not None,
        "mat": lambda part: part == "train" or mat.has_test_part(text),
    }.get(kind, lambda part: part == "train")
    return [part for part in ("train", "test") if has(part)]


def _remade(store, wanted):
    """The same images of another size or colour."""
    if wanted == AS_IT_IS:
        return store
    if store.dtype != "uint8" or store.image_shape[0] not in (1, 3):
        raise UserError(
            f"{store.describe()}: expected gray or RGB images of bytes to resize or convert, found "
            f"{store.dtype} in {store.image_shape[0]} channel(s)"
        )
    return preprocessed(store, wanted)


def kind_of(path, option):
    """What a path holds: "idx", "cifar", "train+test", "files", "classes" (folders); "packed",
    "hdf5", "mat" (files). UserError where it is neither."""
    if os.path.isfile(path):
        return _kind_of_file(path, option)
    check_folder(path, option)
    if idx.is_idx_folder(path):
        return "idx"
    if cifar.find(path) is not None:
        return "cifar"
    cifar.refuse_pickles(path, option)
    if file_of_part(path, "train") is not None:
        return "files"
    # A class may be called "train": only a folder with nothing but such names is a split set.
    names = sub_folders(path)
    if "train" in names and set(names) <= {"train", *TEST_FOLDERS}:
        train = os.path.join(path, "train")
        if sub_folders(train) and not any(file_of_image(e) for e in visible(train)):
            if "test" in names:
                return "train+test"
            others = f" and --test-data {printable(path)}/{names[-1]}" if len(names) > 1 else ""
            raise UserError(
                f"{option} {printable(path)}: found train/ but no test/ beside it; name the "
                f"folders themselves: --data {printable(train)}{others}"
            )
    return "classes"


def _kind_of_file(path, option):
    try:
        with open(path, "rb") as file:
            head = file.read(8)
    except OSError as e:
        raise unreadable(path, e) from None
    if head == SIGNATURE:
        return "packed" if packed.is_packed(path) else "hdf5"
    if head[:6] == b"MATLAB" or path.lower().endswith(".mat"):
        return "mat"
    hint = "; unpack it first" if path.endswith((".gz", ".tar", ".tgz", ".zip")) else ""
    raise UserError(f"{option} {printable(path)}: expected {KNOWN}, found another file{hint}")


def file_of_part(folder, part):
    """The path of train.h5, train.hdf5 or train.mat in a folder, or of test's; or None."""
    paths = [os.path.join(folder, part + suffix) for suffix in FILES]
    return next((path for path in paths if os.path.isfile(path)), None)
