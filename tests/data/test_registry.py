"""Test opening the data sets that --data and --test-data name."""

import datafiles
from image_sets import grow, on_ranks, pixels_of, refusal, save

from mpidl.data import open_data, open_test_data


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
    for part in ("train", "val"):
        grow(tmp_path / "set" / part)
    folder = tmp_path / "set"
    text = refusal(open_data, str(folder))
    assert text.startswith(
        f"--data {folder}: found train/ but no test/; name the folders separately"
    )
    assert text.endswith(f"--data {folder}/train and --test-data {folder}/val")
    errors = on_ranks(2, lambda world: open_data(str(folder), world))
    assert [str(e) for e in errors] == [text] * 2


def test_open_data_accepts_a_folder_of_two_files(tmp_path):
    pixels = pixels_of(0, 6, 2, 2)
    datafiles.hdf5(tmp_path / "train.h5", pixels, [0, 1, 2] * 2, ["a", "b", "c"])
    datafiles.hdf5(tmp_path / "test.h5", pixels[:2], [1, 0], ["c", "a"])
    train, test = open_data(str(tmp_path))
    assert train.classes == test.classes == ["a", "b", "c"] and test.labels.tolist() == [0, 2]
    assert open_test_data(str(tmp_path), classes=["c", "a"]).labels.tolist() == [1, 0]
    (tmp_path / "test.h5").unlink()
    assert open_data(str(tmp_path))[1] is None


def test_open_data_names_files_it_cannot_use(tmp_path):
    save(tmp_path / "1.png", pixels_of(0, 1, 4, 4))
    for name in ("x.txt", "cifar-10-binary.tar.gz"):
        (tmp_path / name).write_bytes(b"no data")
    expected = "expected a folder, an HDF5 file, a .mat file, an .npz file or a .csv table, "
    expected += "found a file of another type"
    hints = {"1.png": "", "x.txt": "", "cifar-10-binary.tar.gz": "; unpack it first"}
    for name, hint in hints.items():
        path = tmp_path / name
        assert refusal(open_data, str(path)) == f"--data {path}: {expected}{hint}"
