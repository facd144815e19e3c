"""Test the pixel pipeline with a user's function: its arguments and its possible results."""

import numpy as np
import pytest
from image_sets import ReadArrays, pixels_of, refusal

import mpidl as dl
from mpidl.core import keyed
from mpidl.data.loading import pipeline
from mpidl.data.transforms.draws import SampleKeys


def store():
    images = np.arange(50 * 12).astype(np.uint8).reshape(50, 1, 3, 4)
    return dl.ArrayDatastore(images, np.arange(50) % 3)


def noise(images, labels, keys):
    """Return floats of twice the width with noise per sample, and two targets per label."""
    indices, epoch, seed = keys
    drawn = [keyed.uniform(seed, "noise", 12, epoch=epoch, sample=int(i)) for i in indices]
    wide = images / np.float32(255) + np.reshape(drawn, images.shape).astype(np.float32)
    return np.concatenate([wide, wide], axis=3), labels[:, None] * np.array([1.5, 2.0])


@pytest.mark.parametrize("prefetch, workers", [(0, 1), (1, 1), (2, 1), (2, 4), (5, 3)])
def test_a_function_gets_a_block_at_a_time(world, prefetch, workers):
    sizes, data = [], store()

    def function(images, labels, keys):
        sizes.append(len(images))
        assert np.array_equal(images, data.images[keys.indices])
        assert np.array_equal(labels, keys.indices % 3)
        return noise(images, labels, keys)

    options = {"prefetch": prefetch, "workers": workers}
    queue = dl.MinibatchQueue(data, 40, 7, world, function=function, **options)
    for images, targets in queue.epoch(2):
        batch = images.batch
        assert images.image_shape == (1, 3, 8) and images.dtype == np.float32
        assert targets.image_shape == (2,) and targets.dtype == np.float32
        if len(batch.indices):
            keys = SampleKeys(batch.indices, 2, 7)
            noisy, doubled = noise(data.images[batch.indices], batch.indices % 3, keys)
            assert np.array_equal(images.local(), noisy)
            assert np.array_equal(targets.local(), doubled.astype(np.float32))
    assert max(sizes) <= 16


def test_a_function_comes_after_the_augmenter_and_before_normalization():
    data, augmenter = store(), dl.Augmenter(reflect_x=True, translate_x=1)

    def function(images, labels, keys):
        indices, epoch, seed = keys
        mapped = augmenter.apply(data.images[indices], indices, epoch=epoch, seed=seed)
        assert images.dtype == np.uint8 and np.array_equal(images, mapped)
        return 255 - images

    queue = dl.MinibatchQueue(data, 20, augmenter=augmenter, function=function)
    for images, labels in queue.epoch(1):
        indices = images.batch.indices
        mapped = augmenter.apply(data.images[indices], indices, epoch=1, seed=0)
        assert np.array_equal(images.local(), (255 - mapped) / np.float32(255))
        assert np.array_equal(labels.local(), indices % 3)


def test_what_a_function_returns_is_checked():
    data = store()

    def changing(images, labels, keys):
        return images if keys.indices[0] == 0 else images[..., 1:]

    for function, text in (
        (lambda x, y, keys: None, "function: expected 1 images, uint8 or float"),
        (lambda x, y, keys: x[:, 0], "function: expected 1 images"),
        (lambda x, y, keys: x.astype(int), "function: expected 1 images"),
        (lambda x, y, keys: (x, ["a"]), "function: expected labels or targets of 1 images"),
        (lambda x, y, keys: x / np.float32(0), "image 0: expected finite pixels"),
    ):
        with np.errstate(all="ignore"):
            assert text in refusal(lambda f=function: dl.MinibatchQueue(data, function=f)), text
    batches = dl.MinibatchQueue(data, 16, shuffle="never", function=changing).epoch(0)
    next(batches)
    assert "expected the same shapes and types as for image 0 (uint8 images of 1x3x4" in refusal(
        next, batches
    )


def test_a_function_gets_moved_targets():
    pairs, augmenter = dl.data.combined(store(), store()), dl.Augmenter(reflect_x=True)

    def function(images, targets, keys):
        assert np.array_equal(images / np.float32(255), targets)
        return images

    queue = dl.MinibatchQueue(pairs, 20, augmenter=augmenter, function=function)
    for images, targets in queue.epoch(1):
        assert np.array_equal(images.local(), targets.local())


@pytest.mark.parametrize("is_augmented", [True, False])
def test_large_images_are_read_a_few_at_a_time(is_augmented, monkeypatch):
    """The mini-batches stay the same. Negative control: small images are read together."""
    images = pixels_of(0, 40, 1, 9, 8)
    counts = []

    class Recorded(ReadArrays):
        def read(self, indices):
            counts.append(len(indices))
            return super().read(indices)

    store = Recorded(images, (images[:, 0] % 3).astype(np.int32))
    options = {"crop": (6, 6)}
    if is_augmented:
        options = {"augmenter": dl.Augmenter(crop=(6, 5), reflect_x=True)}

    def batches():
        counts.clear()
        queue = dl.MinibatchQueue(store, 20, 1, prefetch=0, **options)
        return [[v.local().tobytes() for v in values] for values in queue.epoch(2)]

    expected = batches()
    assert set(counts) == {20}
    monkeypatch.setattr(pipeline, "AT_ONCE", 3 * 9 * 8)
    assert batches() == expected
    assert set(counts) == {2, 3}
