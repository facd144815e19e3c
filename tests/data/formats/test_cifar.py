"""Test reading CIFAR's binary files."""

import os
import pickle

import datafiles
import numpy as np
import pytest
from image_sets import on_ranks, refusal

from mpidl.data import cifar_folder, open_data, open_test_data


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin"])
def test_cifar10(tmp_path, inside):
    drawn = datafiles.cifar10(tmp_path / inside)
    train, test = open_data(str(tmp_path))
    names = [f"data_batch_{i}.bin" for i in range(1, 6)]
    assert np.array_equal(train.labels, np.concatenate([drawn[n][0] for n in names]))
    assert np.array_equal(train.read(np.arange(15)), np.concatenate([drawn[n][1] for n in names]))
    assert train.classes == test.classes == datafiles.CIFAR_NAMES
    assert np.array_equal(test.read([2, 0]), drawn["test_batch.bin"][1][[2, 0]])
    assert test.describe().endswith("CIFAR-10 test: 3 images of 3x32x32 in 10 classes")
    assert np.array_equal(open_test_data(str(tmp_path)).labels, test.labels)
    stores = on_ranks(3, lambda world: cifar_folder(tmp_path, "train", world), list("aab"))
    assert {store.fingerprint() for store in stores} == {train.fingerprint()}
    assert stores[0].images.base is stores[1].images.base


def test_cifar100_has_fine_and_coarse_labels(tmp_path):
    drawn = datafiles.cifar100(tmp_path / "cifar-100-binary")
    train, test = open_data(str(tmp_path))
    coarse, fine, pixels = drawn["train.bin"]
    assert np.array_equal(train.labels, fine) and train.classes[7] == "fine 7"
    assert np.array_equal(train.read([3])[0], pixels[3])
    store = cifar_folder(tmp_path, "train", labels="coarse")
    assert np.array_equal(store.labels, coarse) and len(store.classes) == 20
    assert 'expected "coarse" or "fine", got' in refusal(cifar_folder, tmp_path, labels="rough")


def test_class_names_of_the_files_or_of_a_network(tmp_path):
    drawn = datafiles.cifar10(tmp_path, names=False)
    assert cifar_folder(tmp_path).classes == [str(i) for i in range(10)]
    datafiles.cifar10(tmp_path)
    turned = cifar_folder(tmp_path, classes=datafiles.CIFAR_NAMES[::-1])
    expected = np.concatenate([drawn[f"data_batch_{i}.bin"][0] for i in range(1, 6)])
    assert np.array_equal(turned.labels, 9 - expected.astype(int))
    text = refusal(cifar_folder, tmp_path, classes=["cat", "dog"])
    assert "is not one of the classes (cat, dog)" in text


def test_damaged_files_are_named(tmp_path):
    datafiles.cifar10(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    text = refusal(open_data, str(tmp_path))
    assert text.startswith(f"{path}: expected records of 3073 bytes (CIFAR-10), found 9214 bytes")
    path.write_bytes(content[:3073] + b"\x0a" + content[3074:])
    text = refusal(open_data, str(tmp_path))
    assert text.startswith(f"{path}: image 1: expected a fine label below 10, found 10")
    path.unlink()
    text = refusal(open_data, str(tmp_path))
    assert "expected data_batch_3.bin in addition to the other files; it is missing" in text
    path.write_bytes(content)
    (tmp_path / "batches.meta.txt").write_text("cat\ndog\n")
    text = refusal(open_data, str(tmp_path))
    assert "expected 10 different class names, one per line, found 2" in text
    assert "expected data_batch_1.bin or train.bin" in refusal(cifar_folder, tmp_path / "no")


@pytest.mark.parametrize("names", [("data_batch_1", "batches.meta"), ("train", "test", "meta")])
def test_pickles_are_never_read(tmp_path, names):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    for name in names:
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    text = refusal(open_data, str(tmp_path))
    assert text.startswith(f"--data {tmp_path}: found ") and "binary version" in text
    assert not (tmp_path / "sprung").exists()
