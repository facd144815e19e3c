"""Images with targets, sets that a function has changed, sets of one's own."""

import numpy as np
import pytest
from image_sets import grow, pixels_of, refusal

import mpidl as dl
from mpidl.data import ArrayDatastore, ImageFolder, MinibatchQueue, NodeCache, combined


def test_combined_images(tmp_path):
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
    for world in range(3):  # shares of whole blocks, the last of them ragged or empty
        ((_, part),) = MinibatchQueue(store, world=_Rank(world, 3)).epoch(0)
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
    assert np.array_equal(cache.targets([3, 2]), np.stack([cache.targets([3])[0],
                                                           store.targets([2])[0]]))  # fmt: skip
    assert "no such file" in refusal(store.targets, [3])


@pytest.mark.usefixtures("world")
def test_names_of_pixel_labels():
    """By which the rows of a confusion matrix are called."""
    images = ArrayDatastore(pixels_of(0, 20, 3, 4, 4))
    masks = ArrayDatastore(pixels_of(1, 20, 1, 4, 4) % 3)
    store = combined(images, masks, pixel_labels=True, classes=["sky", "road", "tree"])
    assert store.subset([3, 1]).classes == store.classes == ["sky", "road", "tree"]
    net = dl.Network([dl.Conv2D(3, 3, padding=1)], (3, 4, 4))
    found = dl.evaluate(net, store, confusion=True).confusion
    assert found.classes == ("sky", "road", "tree")
    assert combined(images, np.arange(20), classes="ab").classes == ["a", "b"]
    for targets in (masks, np.linspace(0, 1, 20)):
        assert "classes are for targets that are labels" in refusal(
            combined, images, targets, classes=["a"]
        )


class _Rank:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def test_combined_numbers():
    images = ArrayDatastore(pixels_of(0, 20, 2, 2))
    angles = np.linspace(-1, 1, 20)
    ((_, y),) = MinibatchQueue(combined(images, angles), shuffle="never").epoch(0)
    assert y.image_shape == () and np.array_equal(y.local(), angles.astype(np.float32))
    boxes = np.arange(80).reshape(20, 4)
    ((_, y),) = MinibatchQueue(combined(images, boxes), shuffle="never").epoch(0)
    assert y.dtype == np.int32 and np.array_equal(y.local(), boxes)
    assert combined(images, angles).describe() == "arrays: 20 images of 1x2x2 with a number each"
    assert "as many numbers as images, found 19" in refusal(combined, images, angles[:19])
    other = ArrayDatastore(pixels_of(0, 3, 2, 2))
    assert "as many targets as images, found 3" in refusal(combined, images, other)
    assert "expected numbers as targets" in refusal(combined, images, np.array(["a"] * 20))
    colours = ArrayDatastore(pixels_of(0, 20, 3, 2, 2))
    assert "expected gray images of bytes as pixel labels" in refusal(
        combined, images, colours, pixel_labels=True
    )
    angles[7] = np.nan
    queue = MinibatchQueue(combined(images, angles))
    assert "image 7: expected finite targets, found nan (1 of 1)" in refusal(next, queue.epoch(0))


def test_transform():
    store = ArrayDatastore(pixels_of(0, 30, 4, 4), np.arange(30) % 2)
    seen = []

    def shrink(image, i):
        seen.append((i, image.shape))
        image[0, 0, 0] = 0  # its own copy
        return image[:, ::2, ::2] / 255 - i

    small = store.transform(shrink, include_index=True)
    assert small.image_shape == (1, 2, 2) and small.dtype == np.float32 and len(small) == 30
    assert small.labels is store.labels and small.describe().startswith("arrays, transformed: 30 ")
    found = small.read([4, 2])
    expected = store.read([4, 2])
    expected[:, 0, 0, 0] = 0
    assert np.array_equal(found, (expected[:, :, ::2, ::2] / 255 - [[[[4]]], [[[2]]]]).astype("f4"))
    assert seen[1:] == [(4, (1, 4, 4)), (2, (1, 4, 4))]  # an image at a time
    bright = store.transform(lambda image: 255 - image)
    assert bright.dtype == np.uint8 and np.array_equal(bright.read([3]), 255 - store.read([3]))
    assert len({s.fingerprint() for s in (store, small, bright)}) == 3
    odd = store.transform(lambda image, i: image[:, i:], include_index=True)
    assert "image 1: expected transform to return uint8 of shape (1, 4, 4) as for image 0" in (
        refusal(odd.read, [1])
    )
    assert "expected transform to return uint8 or floats (C, H, W)" in refusal(
        store.transform, lambda image: 3
    )
    empty = ArrayDatastore(np.zeros((0, 2, 2), np.uint8))
    assert "expected images to find the shape" in refusal(empty.transform, lambda image: image)
    assert len(empty.transform(np.copy, image_shape=(1, 2, 2), dtype=np.uint8)) == 0


class Own(dl.data.Datastore):
    """Three methods and two shapes."""

    image_shape, targets_shape, dtype = (1, 3, 3), (2,), np.dtype(np.float32)

    def __len__(self):
        return 37

    def read(self, indices):
        return np.stack([np.full((1, 3, 3), i / 4) for i in indices]) if len(indices) else (
            np.zeros((0, 1, 3, 3)))  # fmt: skip

    def targets(self, indices):
        return np.array([[i, -i] for i in indices], float).reshape(-1, 2)


def test_a_set_of_one_s_own_with_targets(world):
    queue = MinibatchQueue(Own(), batch_size=20, world=world)
    seen = []
    for images, targets in queue.epoch(1):
        assert images.dtype == targets.dtype == np.float32
        assert np.array_equal(images.local()[:, 0, 0, 0] * 4, targets.local()[:, 0])
        assert not targets.lanes[len(targets.lanes) :].any()
        seen += world.broadcast(world.gather(targets.local()[:, 1].tolist()))
    assert sorted(-i for part in seen for i in part) == list(range(37))


def test_a_set_of_one_s_own_that_breaks_its_word():
    class Wrong(Own):
        dtype = np.dtype(np.uint8)

    class Flat(Own):
        def targets(self, indices):
            return np.zeros(len(indices))

    assert "Wrong.read: expected uint8 of shape (37, 1, 3, 3), got float64" in refusal(
        next, MinibatchQueue(Wrong()).epoch(0)
    )
    assert "Flat.targets: expected float32 of shape (37, 2), got float64 of shape (37,)" in refusal(
        next, MinibatchQueue(Flat()).epoch(0)
    )
