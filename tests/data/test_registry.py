"""Opening what --data names, and what no classifier can be trained on."""

import datafiles
import numpy as np
import pytest
from image_sets import grow, on_ranks, pixels_of, refusal, save, write_idx

import mpidl as dl
from mpidl.data import (
    ArrayDatastore,
    HDF5Datastore,
    ImageFolder,
    MinibatchQueue,
    NodeCache,
    idx_folder,
    mat_file,
    open_data,
    open_test_data,
)
from mpidl.data.checks import check_classes


def test_open_data_takes_train_and_test_folders(tmp_path):
    grow(tmp_path / "train")
    grow(tmp_path / "test", classes=("emu",), per_class=2)
    train, test = open_data(str(tmp_path))
    assert len(train) == 9 and test.classes == train.classes and test.labels.tolist() == [2, 2]
    assert open_test_data(str(tmp_path), classes=train.classes).labels.tolist() == [2, 2]
    whole = open_test_data(str(tmp_path / "train"), option="--data")
    assert len(whole) == 9
    save(tmp_path / "test" / "cow" / "1.png", pixels_of(0, 1, 6, 5))
    assert "sub-folder cow is none of the classes" in refusal(open_data, str(tmp_path))


def test_open_data_takes_classes_that_are_called_train(tmp_path):
    grow(tmp_path, classes=("train", "test"))
    store, test = open_data(str(tmp_path))
    assert store.classes == ["test", "train"] and test is None


def test_open_data_errors(tmp_path):
    for url, text in (("s3://bucket/set", "S3 is"), ("https://host/set", "URLs are")):
        text += " not supported yet: expected files of this machine"
        assert refusal(open_data, url) == f"--data {url}: {text}"
        assert refusal(ImageFolder, url) == f"{url}: {text}"
    assert refusal(open_data, "digist").startswith("--data digist: no such folder: did you mean d")
    text = refusal(open_test_data, str(tmp_path / "no"))
    assert text == f"--test-data {tmp_path}/no: no such folder"
    path = save(tmp_path / "1.png", pixels_of(0, 1, 4, 4))
    expected = "expected a folder, an HDF5 file, a .mat file or an .npz file, found another file"
    assert refusal(open_data, str(path)) == f"--data {path}: {expected}"
    for part in ("train", "val"):
        grow(tmp_path / "set" / part)
    folder = tmp_path / "set"
    text = refusal(open_data, str(folder))
    assert text.startswith(f"--data {folder}: found train/ but no test/ beside it")
    assert text.endswith(f"--data {folder}/train and --test-data {folder}/val")
    errors = on_ranks(2, lambda world: open_data(str(folder), world))
    assert [str(e) for e in errors] == [text] * 2


def test_open_data_takes_a_folder_of_two_files(tmp_path):
    pixels = pixels_of(0, 6, 2, 2)
    datafiles.hdf5(tmp_path / "train.h5", pixels, [0, 1, 2] * 2, ["a", "b", "c"])
    datafiles.hdf5(tmp_path / "test.h5", pixels[:2], [1, 0], ["c", "a"])
    train, test = open_data(str(tmp_path))
    assert train.classes == test.classes == ["a", "b", "c"] and test.labels.tolist() == [0, 2]
    assert open_test_data(str(tmp_path), classes=["c", "a"]).labels.tolist() == [1, 0]
    (tmp_path / "test.h5").unlink()
    assert open_data(str(tmp_path))[1] is None


def test_open_data_names_files_it_cannot_use(tmp_path):
    for name, hint in (("x.txt", "another file"), ("cifar-10-binary.tar.gz", "unpack it first")):
        path = tmp_path / name
        path.write_bytes(b"no data")
        text = refusal(open_data, str(path))
        assert text.startswith(
            f"--data {path}: expected a folder, an HDF5 file, a .mat file or an .npz file"
        )
        assert text.endswith(hint)


# What a network cannot be trained on


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_pixels_that_are_no_numbers(tmp_path, value):
    images = np.random.default_rng(0).random((20, 1, 3, 3)).astype(np.float32)
    images[13, 0, 1, 1:] = value
    labels = np.arange(20) % 2
    path = datafiles.hdf5(tmp_path / "x.h5", images, labels, layout="NCHW")
    mat = datafiles.mat73(
        tmp_path / "x.mat", X=datafiles.matlab(images), Y=labels[:, None].astype(float)
    )
    write_idx(tmp_path / "train-images-idx3-ubyte", images[:, 0].astype(">f4"), 0x0D)
    write_idx(tmp_path / "train-labels-idx1-ubyte", labels.astype(np.uint8))
    stores = {
        path: HDF5Datastore(path),
        mat: mat_file(mat),
        tmp_path / "train-images-idx3-ubyte": idx_folder(tmp_path),
        "arrays": ArrayDatastore(images, labels),
    }
    for where, store in stores.items():
        expected = f"{where}: image 13: expected finite pixels, found {value} (2 of 9)"
        for wrapped in (store, store.subset(np.arange(20)), NodeCache(store)):
            assert refusal(next, MinibatchQueue(wrapped).epoch(0)) == expected
    huge = np.full((4, 1, 2, 2), 3e38, np.float32)  # whose sum is infinite
    next(MinibatchQueue(ArrayDatastore(huge)).epoch(0))


def test_one_class_trains_no_classifier(world):
    store = ArrayDatastore(pixels_of(0, 4, 2, 2), [1, 1, 1, 1], ["cat", "dog"])
    text = "expected images of two classes at least to train a classifier, found those of one (dog)"
    assert text in refusal(check_classes, store)
    net = dl.Network([dl.Dense(2)], (1, 2, 2))
    options = dl.TrainingOptions(epochs=1)
    assert text in refusal(dl.train, net, store, options, world=world)
    bare = ArrayDatastore(pixels_of(0, 4, 2, 2))
    assert "expected labels to train a classifier" in refusal(
        dl.train, net, bare, options, world=world
    )
    check_classes(ArrayDatastore(pixels_of(0, 4, 2, 2), [1, 1, 0, 1]))
