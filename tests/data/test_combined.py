"""Test datasets that combine images with targets: images, numbers and pixel labels."""

from types import SimpleNamespace

import numpy as np
import pytest
from image_sets import grow, pixels_of, refusal

import mpidl as dl
from mpidl.data import ArrayDatastore, ImageFolder, MinibatchQueue, NodeCache, combined


def test_images_as_targets(tmp_path):
    grow(tmp_path / "noisy")
    grow(tmp_path / "clean", classes=("x",), per_class=9)
    noisy, clean = ImageFolder(tmp_path / "noisy"), ImageFolder(tmp_path / "clean")
    store = combined(noisy, clean)
    assert store.targets_shape == (1, 6, 5) and store.targets_dtype == np.float32
    assert store.describe().endswith("9 images of 1x6x5 with targets of 1x6x5")
    order = MinibatchQueue(store).order(0)
    ((images, targets),) = MinibatchQueue(store).epoch(0)
    assert np.array_equal(targets.local(), clean.read(order) / np.float32(255))
    assert np.array_equal(images.local(), noisy.read(order) / np.float32(255))
    for rank in range(3):  # shares of whole blocks; the last share is ragged or empty
        world = SimpleNamespace(rank=rank, size=3)
        ((_, part),) = MinibatchQueue(store, world=world).epoch(0)
        assert part.lanes.shape == (part.batch.blocks, 1, 6, 5, 16)
    masks = combined(noisy, clean, pixel_labels=True)
    ((_, codes),) = MinibatchQueue(masks, shuffle="never").epoch(0)
    assert codes.dtype == np.int32 and np.array_equal(codes.local(), clean.read(range(9))[:, 0])
    assert store.fingerprint() != masks.fingerprint() != noisy.fingerprint()
    part = store.subset([4, 2])
    assert np.array_equal(part.targets([1]), store.targets([2])) and part.targets_shape == (1, 6, 5)
    assert [len(half) for half in store.split(0.5)] == [6, 3]
    cache = NodeCache(store)
    assert cache.capacity == 9 and np.array_equal(cache.targets([3]), store.targets([3]))
    (tmp_path / "clean" / "x" / "3.png").unlink()
    expected = [cache.targets([3])[0], store.targets([2])[0]]
    assert np.array_equal(cache.targets([3, 2]), np.stack(expected))
    assert "the file no longer exists" in refusal(store.targets, [3])


@pytest.mark.usefixtures("world")
def test_names_of_pixel_labels():
    """The names of pixel labels are the row names of a confusion matrix."""
    images = ArrayDatastore(pixels_of(0, 20, 3, 4, 4))
    masks = ArrayDatastore(pixels_of(1, 20, 1, 4, 4) % 3)
    store = combined(images, masks, pixel_labels=True, classes=["sky", "road", "tree"])
    assert store.subset([3, 1]).classes == store.classes == ["sky", "road", "tree"]
    net = dl.Network([dl.Conv2D(3, 3, padding=1)], (3, 4, 4))
    assert dl.evaluate(net, store, confusion=True).confusion.classes == ("sky", "road", "tree")
    assert combined(images, np.arange(20), classes="ab").classes == ["a", "b"]
    for targets in (masks, np.linspace(0, 1, 20)):
        text = refusal(combined, images, targets, classes=["a"])
        assert "classes requires targets that are labels" in text


def test_numbers_as_targets():
    images = ArrayDatastore(pixels_of(0, 20, 2, 2))
    angles = np.linspace(-1, 1, 20)
    ((_, y),) = MinibatchQueue(combined(images, angles), shuffle="never").epoch(0)
    assert y.image_shape == () and np.array_equal(y.local(), angles.astype(np.float32))
    boxes = np.arange(80).reshape(20, 4)
    ((_, y),) = MinibatchQueue(combined(images, boxes), shuffle="never").epoch(0)
    assert y.dtype == np.int32 and np.array_equal(y.local(), boxes)
    assert combined(images, angles).describe() == "arrays: 20 images of 1x2x2 with one target each"
    assert "as many numbers as images, found 19" in refusal(combined, images, angles[:19])
    other = ArrayDatastore(pixels_of(0, 3, 2, 2))
    assert "as many targets as images, found 3" in refusal(combined, images, other)
    assert "expected numbers as targets" in refusal(combined, images, np.array(["a"] * 20))
    colours = ArrayDatastore(pixels_of(0, 20, 3, 2, 2))
    text = refusal(combined, images, colours, pixel_labels=True)
    assert "expected gray uint8 images as pixel labels" in text
    angles[7] = np.nan
    queue = MinibatchQueue(combined(images, angles))
    assert "image 7: expected finite targets, found nan (1 of 1)" in refusal(next, queue.epoch(0))
