"""Test arrays, subsets, splits, transforms, and datasets that a user defines."""

import numpy as np
import pytest
from image_sets import pixels_of, refusal

from mpidl.data import ArrayDatastore, ImageFolder, MinibatchQueue
from mpidl.data.datastore import Datastore
from mpidl.errors import UserError


def test_arrays():
    images = pixels_of(0, 4, 3, 2)
    store = ArrayDatastore(images, [1, 0, 2, 1])
    assert store.image_shape == (1, 3, 2) and store.classes == ["0", "1", "2"]
    assert np.array_equal(store.read([3, 1]), images[[3, 1], None])
    assert store.name(3) == "image 3"
    assert store.describe() == "arrays: 4 images of 1x3x2 in 3 classes"
    floats = ArrayDatastore(images[:, None] / 7.0)
    assert floats.labels is None and floats.dtype == np.float32
    assert np.array_equal(floats.read([2])[0, 0], (images[2] / 7.0).astype(np.float32))


def test_arrays_are_checked():
    images = pixels_of(0, 4, 3, 2)
    text = refusal(ArrayDatastore, images.astype(int))
    assert "expected uint8 or float images" in text and "got int64 of shape (4, 1, 3, 2)" in text
    assert "(4,), got labels of shape (3,)" in refusal(ArrayDatastore, images, [0, 1, 2])
    assert "labels below 2" in refusal(ArrayDatastore, images, [0, 1, 2, 0], ["a", "b"])
    assert "whole numbers from 0" in refusal(ArrayDatastore, images, [0, 1, -1, 0])
    assert "got float64" in refusal(ArrayDatastore, images, [0.0, 1.0, 1.0, 0.0])


def test_labels_may_be_class_names():
    """Lists and arrays of strings have the classes in their sorted order."""
    images, names = pixels_of(0, 5, 3, 3), ["dog", "cat", "emu", "cat", "dog"]
    for labels in (names, np.array(names), np.array(names, object), np.array(names)[:, None]):
        store = ArrayDatastore(images, labels)
        assert store.classes == ["cat", "dog", "emu"] and store.labels.dtype == np.int64
        assert store.labels.tolist() == [1, 0, 2, 0, 1]
    assert ArrayDatastore(images, np.array(names, "S")).classes == ["cat", "dog", "emu"]
    assert ArrayDatastore(images, "10 9 2 9 2".split()).classes == ["2", "9", "10"]
    mapped = ArrayDatastore(images, names, ["emu", "dog", "cat", "fox"])
    assert mapped.labels.tolist() == [1, 2, 0, 2, 1] and mapped.classes[3] == "fox"
    text = refusal(ArrayDatastore, images, names, ["cat", "dog"])
    assert text == "arrays: label emu is not one of the classes (cat, dog)"
    assert "may also be class names" in refusal(ArrayDatastore, images, ["dog", 1, None, 2, 3])
    assert "labels" in refusal(ArrayDatastore, images, "cat")
    assert ArrayDatastore(images, np.array([[1], [0], [1], [0], [2]])).labels.tolist()[4] == 2


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_arrays_of_other_libraries_are_refused(channels):
    """Channels are the second axis. An array (n, H, W, C) is an error that names the remedy."""
    images = pixels_of(0, 4, 7, 6, channels)
    text = refusal(ArrayDatastore, images)
    assert f"(n, C, H, W), found (4, 7, 6, {channels})" in text
    assert "images.transpose(0, 3, 1, 2)" in text and 'layout="NCHW"' in text
    expected = images.transpose(0, 3, 1, 2)
    for store in (ArrayDatastore(images, layout="NHWC"), ArrayDatastore(expected)):
        assert store.image_shape == (channels, 7, 6)
        assert np.array_equal(store.read([2, 0]), expected[[2, 0]])
    store = ArrayDatastore(images, layout="NCHW")
    assert store.image_shape == (7, 6, channels) and np.array_equal(store.array(), images)


def test_images_with_channels_first_are_accepted():
    """Negative control: more channels than pixels in a row are not an error by themselves."""
    for shape in ((2, 512, 4, 4), (2, 3, 100, 1), (2, 64, 1, 1), (2, 8, 5, 5), (2, 1, 9, 3)):
        assert ArrayDatastore(np.zeros(shape, np.uint8)).image_shape == shape[1:]


def test_subset_of_a_subset():
    store = ArrayDatastore(pixels_of(0, 6, 2, 2), [0, 1, 2, 0, 1, 2])
    part = store.subset([5, 3, 1]).subset([2, 0])
    assert part.labels.tolist() == [1, 2]
    assert [part.name(i) for i in (0, 1)] == ["image 1", "image 5"]
    assert np.array_equal(part.read([1, 0]), store.read([5, 1]))
    assert part.describe() == "2 of arrays: 6 images of 1x2x2 in 3 classes"
    with pytest.raises(IndexError, match="0 to 5, got 0 to 6"):
        store.subset([0, 6])


def test_split_is_per_label_seeded_and_in_order():
    labels = np.array([0] * 50 + [1] * 5 + [2] * 1)[np.random.default_rng(0).permutation(56)]
    store = ArrayDatastore(np.arange(56, dtype=np.uint8).reshape(56, 1, 1), labels)
    first, second = store.split(0.29, seed=3)
    # 0.29 of 50, 5 and 1 images: 14.5, 1.45 and 0.29, rounded half up
    assert np.bincount(first.labels, minlength=3).tolist() == [15, 1, 0]
    assert np.bincount(second.labels, minlength=3).tolist() == [35, 4, 1]
    parts = [part.read(np.arange(len(part))).reshape(-1) for part in (first, second)]
    assert all((np.diff(part.astype(int)) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(56))
    assert np.array_equal(first.indices, store.split(0.29, seed=3)[0].indices)
    assert not np.array_equal(first.indices, store.split(0.29, seed=4)[0].indices)
    assert [len(part) for part in store.split(1.0)] == [56, 0]
    assert "between 0 and 1, which add up to at most 1, found 1.5" in refusal(store.split, 1.5)


def test_a_split_into_several_parts():
    """The first part is the same as in a split into two. The parts contain each image once."""
    labels = np.array([0] * 50 + [1] * 7 + [2] * 3)[np.random.default_rng(1).permutation(60)]
    store = ArrayDatastore(np.arange(60, dtype=np.uint8).reshape(60, 1, 1), labels, "abc")
    parts = store.split(0.7, 0.2, seed=5)
    # Of 50, 7 and 3 images, part 1 ends at 35, 4.9 and 2.1, and part 2 at 45, 6.3 and 2.7.
    counts = [list(part.class_counts().values()) for part in parts]
    assert counts == [[35, 5, 2], [10, 1, 1], [5, 1, 0]]
    assert np.array_equal(parts[0].indices, store.split(0.7, seed=5)[0].indices)
    assert sorted(np.concatenate([part.indices for part in parts]).tolist()) == list(range(60))
    assert all((np.diff(part.indices) > 0).all() for part in parts)
    assert [len(part) for part in store.split(0.1 + 0.2, 0.7)] == [18, 42, 0]  # 0.30000000000000004


def test_a_split_by_counts():
    labels = np.array([0] * 50 + [1] * 7 + [2] * 3)
    store = ArrayDatastore(np.zeros((60, 1, 1), np.uint8), labels, ["ape", "bee", "cow"])
    first, second, rest = store.split(2, 1, seed=5)
    assert first.class_counts() == {"ape": 2, "bee": 2, "cow": 2}
    assert second.class_counts() == {"ape": 1, "bee": 1, "cow": 1}
    assert rest.class_counts() == {"ape": 47, "bee": 4, "cow": 0}
    assert np.array_equal(first.indices, store.split(2, seed=5)[0].indices)
    unlabelled = ArrayDatastore(np.zeros((9, 1, 1), np.uint8))
    assert [len(part) for part in unlabelled.split(np.int64(4), 2)] == [4, 2, 3]
    text = "arrays: 60 images of 1x1x1 in 3 classes: split: expected at least 4 images of class "
    assert refusal(store.split, 4) == text + "cow, found 3"
    text = "arrays: 9 images of 1x1x1: split: expected at least 10 images, found 9"
    assert refusal(unlabelled.split, 6, 4) == text
    assert "at least 0, found -1" in refusal(store.split, -1)
    for sizes in ((0.9, "randomized"), (0.9, 1), (True,), ()):
        text = refusal(store.split, *sizes)
        assert "or images per label such as 100, 20" in text and "at random (see seed=)" in text
    for sizes in (0.7, 0.4), (float("nan"),), (-0.1, 0.5), (np.inf,):
        assert "which add up to at most 1" in refusal(store.split, *sizes)
    assert "expected images with labels to count" in refusal(unlabelled.class_counts)
    store = ArrayDatastore(np.zeros((6, 1, 1), np.uint8), [0, 1, 1, 2, 2, 2], ["ape", "bee", "ape"])
    assert store.class_counts() == {"ape": 4, "bee": 2}


def test_unknown_arguments_are_explained(tmp_path):
    with pytest.raises(TypeError, match="^MinibatchQueue: unknown argument mini_batch_size: did "):
        MinibatchQueue(ArrayDatastore(pixels_of(0, 4, 3, 2)), mini_batch_size=2)
    with pytest.raises(TypeError) as raised:
        ImageFolder(tmp_path, include_subfolders=True)
    text = "ImageFolder: unknown argument include_subfolders: sub-folders are always included"
    assert str(raised.value) == text
    with pytest.raises(TypeError, match="^ArrayDatastore: unknown argument xyz$"):
        ArrayDatastore(pixels_of(0, 4, 3, 2), xyz=2)


def test_the_fingerprint_depends_on_pixels_labels_and_classes():
    images = pixels_of(0, 5, 2, 2)
    labels = np.array([0, 1, 0, 1, 1])
    sets = [
        ArrayDatastore(images, labels),
        ArrayDatastore(images),
        ArrayDatastore(images, labels[::-1]),
        ArrayDatastore(images[::-1], labels),
        ArrayDatastore(images, labels, ["a", "b"]),
        ArrayDatastore(images, labels).subset([0, 1]),
        ArrayDatastore(images, labels).subset([1, 0]),
    ]
    assert len({store.fingerprint() for store in sets}) == len(sets)
    assert sets[0].fingerprint() == ArrayDatastore(images.copy(), labels).fingerprint()


def test_transform():
    store = ArrayDatastore(pixels_of(0, 30, 4, 4), np.arange(30) % 2)
    calls = []

    def shrink(image, i):
        calls.append((i, image.shape))
        image[0, 0, 0] = 0  # changes only the function's copy
        return image[:, ::2, ::2] / 255 - i

    small = store.transform(shrink, include_index=True)
    assert small.image_shape == (1, 2, 2) and small.dtype == np.float32 and len(small) == 30
    assert small.labels is store.labels and small.describe().startswith("arrays, transformed: 30 ")
    images, expected = small.read([4, 2]), store.read([4, 2])
    expected[:, 0, 0, 0] = 0
    expected = expected[:, :, ::2, ::2] / 255 - [[[[4]]], [[[2]]]]
    assert np.array_equal(images, expected.astype(np.float32))
    assert calls[1:] == [(4, (1, 4, 4)), (2, (1, 4, 4))]  # one image at a time
    bright = store.transform(lambda image: 255 - image)
    assert bright.dtype == np.uint8 and np.array_equal(bright.read([3]), 255 - store.read([3]))
    assert len({s.fingerprint() for s in (store, small, bright)}) == 3


def test_transforms_are_checked():
    store = ArrayDatastore(pixels_of(0, 30, 4, 4), np.arange(30) % 2)
    odd = store.transform(lambda image, i: image[:, i:], include_index=True)
    text = refusal(odd.read, [1])
    assert "image 1: expected transform to return uint8 of shape (1, 4, 4) as for image 0" in text
    text = refusal(store.transform, lambda image: 3)
    assert "expected transform to return uint8 or floats (C, H, W)" in text
    empty = ArrayDatastore(np.zeros((0, 2, 2), np.uint8))
    assert "expected an image to determine the transformed shape" in refusal(
        empty.transform, lambda image: image
    )
    assert len(empty.transform(np.copy, image_shape=(1, 2, 2), dtype=np.uint8)) == 0


class UserDatastore(Datastore):
    """A minimal dataset that a user defines: three methods and two shapes."""

    image_shape, targets_shape, dtype = (1, 3, 3), (2,), np.dtype(np.float32)

    def __len__(self):
        return 37

    def read(self, indices):
        return np.array(indices).reshape(-1, 1, 1, 1) / 4 + np.zeros((1, 3, 3))

    def targets(self, indices):
        return np.array([[i, -i] for i in indices], float).reshape(-1, 2)


def test_a_dataset_that_a_user_defines(world):
    second_targets = []
    for images, targets in MinibatchQueue(UserDatastore(), batch_size=20, world=world).epoch(1):
        assert images.dtype == targets.dtype == np.float32
        assert np.array_equal(images.local()[:, 0, 0, 0] * 4, targets.local()[:, 0])
        assert not targets.lanes[len(targets.lanes) :].any()
        second_targets += world.allgather(targets.local()[:, 1].tolist())
    assert sorted(-i for part in second_targets for i in part) == list(range(37))


def test_what_a_user_s_dataset_returns_is_checked():
    class Doubles(UserDatastore):
        dtype = np.dtype(np.uint8)

    class Flat(UserDatastore):
        def targets(self, indices):
            return np.zeros(len(indices))

    text = refusal(next, MinibatchQueue(Doubles()).epoch(0))
    assert "Doubles.read: expected uint8 of shape (37, 1, 3, 3), got float64" in text
    text = refusal(next, MinibatchQueue(Flat()).epoch(0))
    assert "Flat.targets: expected float32 of shape (37, 2), got float64 of shape (37,)" in text


def test_indexing_and_iteration_give_images_with_labels():
    pixels = np.arange(5 * 12, dtype=np.uint8).reshape(5, 1, 3, 4)
    targets = np.arange(10.0).reshape(5, 2)
    sets = {
        "label": ArrayDatastore(pixels, [2, 0, 1, 1, 0]),
        "target": ArrayDatastore(pixels, targets=targets),
        "nothing": ArrayDatastore(pixels),
    }
    for kind, store in sets.items():
        expected = {"label": [2, 0, 1, 1, 0], "target": targets, "nothing": [None] * 5}[kind]
        pairs = list(store)
        assert len(pairs) == len(store) == 5
        for i, (image, label) in enumerate(pairs):
            assert np.array_equal(image, pixels[i]) and np.array_equal(label, expected[i])
            assert np.array_equal(store[i - 5][0], image)
        part = store.subset([3, 1])
        assert np.array_equal(part[-1][0], pixels[1])
        for i in (5, -6):
            with pytest.raises(IndexError, match=f"an index below 5, the images, found {i}"):
                store[i]
        with pytest.raises(TypeError, match=r"found slice\(0, 2, None\); subset\(indices\)"):
            store[0:2]


def test_iteration_over_a_queue_names_the_epoch():
    queue = MinibatchQueue(ArrayDatastore(np.zeros((5, 1, 3, 3), np.uint8)))
    with pytest.raises(UserError, match=r"for images, labels in queue\.epoch\(epoch\)"):
        for _ in queue:
            pass
