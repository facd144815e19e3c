"""Test opening the data sets that --data and --test-data name."""

import datafiles
import pytest
from image_sets import grow, on_ranks, pixels_of, refusal, save

from mpidl.data import ImageFolder, open_data, open_test_data, open_validation_data


def test_open_data_accepts_train_and_test_folders(tmp_path):
    grow(tmp_path / "train")
    grow(tmp_path / "test", classes=("emu",), per_class=2)
    train, test = open_data(str(tmp_path))
    assert len(train) == 9 and test.classes == train.classes and test.labels.tolist() == [2, 2]
    assert open_test_data(str(tmp_path), classes=train.classes).labels.tolist() == [2, 2]
    assert len(open_test_data(str(tmp_path / "train"), option="--data")) == 9
    save(tmp_path / "test" / "cow" / "1.png", pixels_of(0, 1, 6, 5))
    assert "sub-folder cow is not one of the classes" in refusal(open_data, str(tmp_path))


def test_open_data_accepts_classes_named_train_and_test(tmp_path):
    grow(tmp_path, classes=("train", "test"))
    store, test = open_data(str(tmp_path))
    assert store.classes == ["test", "train"] and test is None


def test_open_data_errors(tmp_path):
    assert refusal(open_data, "digist").startswith("--data digist: no such folder: did you mean d")
    text = refusal(open_test_data, str(tmp_path / "no"))
    assert text == f"--test-data {tmp_path}/no: no such folder"
    grow(tmp_path / "set" / "train")
    folder = tmp_path / "set"
    text = refusal(open_data, str(folder))
    assert text == (
        f"--data {folder}: found train/ but no test/; name the folder itself: --data {folder}/train"
    )
    errors = on_ranks(2, lambda world: open_data(str(folder), world))
    assert [str(e) for e in errors] == [text] * 2


@pytest.mark.parametrize("name", ["validation", "val", "valid", "Val"])
def test_a_folder_beside_train_is_the_validation_set(tmp_path, name):
    for part, classes in (("train", "ab"), ("test", "ab"), (name, "b")):
        grow(tmp_path / part, classes=tuple(classes))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "read.me").write_text("no image")
    train, test = open_data(str(tmp_path))
    validation = open_validation_data(str(tmp_path), classes=train.classes)
    assert train.classes == test.classes == validation.classes == ["a", "b"]
    assert [len(store) for store in (train, validation, test)] == [6, 3, 6]
    assert validation.labels.tolist() == [1, 1, 1]
    assert validation.describe().startswith(f"{tmp_path}/{name}: 3 images")
    options = {"classes": train.classes, "option": "--validation-data"}
    assert open_test_data(str(tmp_path), **options).folder == f"{tmp_path}/{name}"
    assert open_test_data(str(tmp_path), classes=train.classes).folder == f"{tmp_path}/test"


def test_a_validation_folder_needs_no_test_folder(tmp_path):
    for part in ("train", "val"):
        grow(tmp_path / part)
    assert open_data(str(tmp_path))[1] is None
    assert open_validation_data(str(tmp_path)).folder == f"{tmp_path}/val"
    assert open_test_data(str(tmp_path), option="--data").folder == f"{tmp_path}/val"
    text = refusal(open_test_data, str(tmp_path))  # the validation images are no test
    assert "--test-data" in text and "found only training and validation images" in text


def test_images_beside_train_and_test_are_refused(tmp_path):
    """A third folder would otherwise make train, test and the folder three classes."""
    for part in ("train", "test", "extra"):
        grow(tmp_path / part)
    expected = f"{tmp_path}: found images in extra/ beside train/, test/: expected only train/, "
    for open_set in (open_data, open_test_data, open_validation_data, ImageFolder):
        text = refusal(open_set, str(tmp_path))
        assert text.startswith(expected) and f"--data {tmp_path}/train" in text
    (tmp_path / "extra").rename(tmp_path / "val")
    grow(tmp_path / "valid")
    assert "found val/ and valid/, which name the same part" in refusal(open_data, str(tmp_path))


def test_an_image_folder_of_parts_is_refused(tmp_path):
    for part in ("train", "test"):
        grow(tmp_path / part)
    expected = "found parts of a set (train/, test/): use dl.data.open_data(folder, world)"
    assert refusal(ImageFolder, tmp_path).endswith(expected)
    assert ImageFolder(tmp_path, labelled=False).labels.tolist() == [0] * 9 + [1] * 9


def test_open_data_accepts_a_folder_of_two_files(tmp_path):
    pixels = pixels_of(0, 6, 2, 2)
    datafiles.hdf5(tmp_path / "train.h5", pixels, [0, 1, 2] * 2, ["a", "b", "c"])
    datafiles.hdf5(tmp_path / "test.h5", pixels[:2], [1, 0], ["c", "a"])
    train, test = open_data(str(tmp_path))
    assert train.classes == test.classes == ["a", "b", "c"] and test.labels.tolist() == [0, 2]
    assert open_test_data(str(tmp_path), classes=["c", "a"]).labels.tolist() == [1, 0]
    datafiles.hdf5(tmp_path / "val.h5", pixels[:3], [1, 1, 0], ["c", "a"])
    validation = open_validation_data(str(tmp_path), classes=train.classes)
    assert validation.labels.tolist() == [0, 0, 2]
    (tmp_path / "test.h5").unlink()
    assert open_data(str(tmp_path))[1] is None
    datafiles.hdf5(tmp_path / "valid.h5", pixels[:3], [1, 1, 0], ["c", "a"])
    text = refusal(open_data, str(tmp_path))
    assert (
        text == f"{tmp_path}: found val.h5 and valid.h5, which name the same part: keep one of them"
    )


def test_open_data_names_files_it_cannot_use(tmp_path):
    save(tmp_path / "1.png", pixels_of(0, 1, 4, 4))
    for name in ("x.txt", "cifar-10-binary.tar.gz"):
        (tmp_path / name).write_bytes(b"no data")
    expected = "expected a folder, an HDF5 file, a .mat file, an .npz file or a .csv table, "
    expected += "found a file of another type"
    hints = {
        "1.png": "; to read an image, name the folder that contains it",
        "x.txt": "",
        "cifar-10-binary.tar.gz": "; unpack it first",
    }
    for name, hint in hints.items():
        path = tmp_path / name
        assert refusal(open_data, str(path)) == f"--data {path}: {expected}{hint}"
