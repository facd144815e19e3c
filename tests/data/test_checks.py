"""Test checks of datasets: finite pixels, and classes suitable for training a classifier."""

import datafiles
import numpy as np
import pytest
from image_sets import pixels_of, refusal, write_idx

import mpidl as dl
from mpidl.data import ArrayDatastore, MinibatchQueue, NodeCache, combined
from mpidl.data.checks import (
    check_classes,
    empty_classes_warning,
    read_images,
    read_targets,
)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_pixels_must_be_finite(tmp_path, value):
    images = np.random.default_rng(0).random((20, 1, 3, 3)).astype(np.float32)
    images[13, 0, 1, 1:] = value
    labels = np.arange(20) % 2
    path = datafiles.hdf5(tmp_path / "x.h5", images, labels, layout="NCHW")
    mat = tmp_path / "x.mat"
    datafiles.mat73(mat, X=datafiles.matlab(images), Y=labels[:, None].astype(float))
    idx = write_idx(tmp_path / "train-images-idx3-ubyte", images[:, 0].astype(">f4"), 0x0D)
    write_idx(tmp_path / "train-labels-idx1-ubyte", labels.astype(np.uint8))
    stores = {
        path: dl.data.HDF5Datastore(path),
        mat: dl.data.mat_file(mat),
        idx: dl.data.idx_folder(tmp_path),
        "arrays": ArrayDatastore(images, labels),
    }
    for source, store in stores.items():
        expected = f"{source}: image 13: expected finite pixels, found {value} (2 of 9)"
        for wrapped in (store, store.subset(np.arange(20)), NodeCache(store)):
            assert refusal(next, MinibatchQueue(wrapped).epoch(0)) == expected
    huge = np.full((4, 1, 2, 2), 3e38, np.float32)  # finite, but the sum is infinite
    next(MinibatchQueue(ArrayDatastore(huge)).epoch(0))


def test_one_class_trains_no_classifier(world):
    store = ArrayDatastore(pixels_of(0, 4, 2, 2), [1, 1, 1, 1], ["cat", "dog"])
    text = "expected images of at least two classes to train a classifier, found only one (dog)"
    assert text in refusal(check_classes, store)
    net = dl.Network([dl.Dense(2)], (1, 2, 2))
    options = dl.TrainingOptions(epochs=1)
    assert text in refusal(dl.train, net, store, options, world=world)
    bare = ArrayDatastore(pixels_of(0, 4, 2, 2))
    text = refusal(dl.train, net, bare, options, world=world)
    assert "expected labels to train a classifier" in text
    check_classes(ArrayDatastore(pixels_of(0, 4, 2, 2), [1, 1, 0, 1]))


def test_classes_without_images_are_warned_of():
    def warning(labels, classes=None):
        images = np.zeros((len(labels), 2, 2), np.uint8)
        return empty_classes_warning(ArrayDatastore(images, labels, classes))

    assert warning([0, 1, 2]) is warning([1, 0], ["a", "b"]) is None
    assert warning([1, 2, 10]).endswith(
        ": no image of classes 0, 3, 4 and 5 more (of 11): labels start at 0"
    )
    assert warning([0, 1, 3]).endswith(": no image of class 2 (of 4)")
    assert warning([1, 1], ["cat", "d\nog"]).endswith(" in 2 classes: no image of class cat (of 2)")
    assert warning([0, 0], ["cat", "d\nog"]).endswith(": no image of class d\\nog (of 2)")
    bare = ArrayDatastore(np.zeros((3, 2, 2), np.uint8))
    assert empty_classes_warning(bare) is empty_classes_warning(combined(bare, np.zeros(3))) is None


def test_labels_may_be_any_whole_numbers_and_pixels_may_not():
    class Maps(dl.data.Datastore):
        image_shape, dtype, targets_shape = (1, 2, 2), np.float32, (2, 2)
        targets_dtype = np.dtype(np.uint8)
        pixels_dtype = np.float32

        def __len__(self):
            return 3

        def read(self, indices):
            return np.zeros((len(indices), 1, 2, 2), self.pixels_dtype)

        def targets(self, indices):
            return np.ones((len(indices), 2, 2), np.int64)

    maps = Maps()
    assert read_targets(maps, [0, 2]).dtype == np.uint8
    assert read_images(maps, [0, 2]).dtype == np.float32
    maps.dtype, maps.pixels_dtype = np.dtype(np.uint8), np.int64
    assert refusal(read_images, maps, [1]) == (
        "Maps.read: expected uint8 of shape (1, 1, 2, 2), got int64 of shape (1, 1, 2, 2)"
    )
