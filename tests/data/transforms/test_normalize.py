"""Test normalization: exact statistics on any number of ranks, and normalized images."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from image_sets import on_ranks, pixels_of, refusal

import mpidl as dl
from mpidl.data.transforms import normalize


def exact(images):
    """Return (mean image, mean, variance) of uint8 images, computed exactly and rounded once."""
    pixels = images.astype(np.int64)
    mean_image = pixels.sum(axis=0) / len(images)
    mean, variance = [], []
    for c in range(images.shape[1]):
        values, n = pixels[:, c].ravel(), pixels[:, c].size
        total, squares = int(values.sum()), int((values**2).sum())
        mean.append(float(Fraction(total, n)))
        variance.append(float(Fraction(squares, n) - Fraction(total, n) ** 2))
    return mean_image, np.array(mean), np.array(variance)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_statistics_of_bytes_are_exact_on_any_number_of_ranks(ranks, monkeypatch):
    monkeypatch.setattr(normalize, "CHUNK", 1)
    images = pixels_of(4, 70, 2, 5, 3)
    store = dl.ArrayDatastore(images)
    expected = exact(images)
    for statistics in on_ranks(ranks, lambda world: normalize.statistics(store, Gops(world))):
        for name, array in zip(("mean_image", "mean", "variance"), expected, strict=True):
            assert np.array_equal(getattr(statistics, name), array)
        assert statistics.count == 70
        assert statistics.low.tolist() == images.min(axis=(0, 2, 3)).tolist()
        assert statistics.high.tolist() == images.max(axis=(0, 2, 3)).tolist()


class Gops:
    """A simulated world with the methods that `statistics` calls."""

    def __init__(self, world):
        self.inner, self.rank, self.size = world, world.rank, world.size

    def raise_if_any(self, error):
        self.inner.raise_if_any(error)

    def gop(self, name, value):
        parts = self.inner.exchange(value)
        return getattr(np, name)(parts, axis=0)


def test_statistics_on_the_ranks_of_this_session(world):
    """Statistics of floats are folded, so they have the same bytes as on one rank."""
    images = np.random.default_rng(0).normal(5, 2, (85, 3, 4, 6)).astype(np.float32)
    store = dl.ArrayDatastore(images)
    folded, on_one_rank = normalize.statistics(store, world), normalize.statistics(store)
    wide = images.astype(np.float64)
    assert np.allclose(folded.mean_image, wide.mean(axis=0), rtol=1e-14)
    assert np.allclose(folded.mean, wide.mean(axis=(0, 2, 3)), rtol=1e-14)
    assert np.allclose(folded.variance, wide.var(axis=(0, 2, 3)), rtol=1e-13)
    for name in ("mean_image", "mean", "variance", "low", "high"):
        assert getattr(folded, name).tobytes() == getattr(on_one_rank, name).tobytes()
    images = pixels_of(5, 40, 1, 7, 7)  # bytes
    statistics = normalize.statistics(dl.ArrayDatastore(images), world)
    assert np.array_equal(statistics.variance, exact(images)[2])


def test_an_unreadable_image_is_an_error_on_all_ranks():
    class Broken(dl.ArrayDatastore):
        def read(self, indices):
            if 40 in indices:
                raise dl.UserError("image 40 is gone")
            return super().read(indices)

    store = Broken(np.zeros((64, 1, 2, 2), np.uint8))
    errors = on_ranks(2, lambda world: normalize.statistics(store, Gops(world)))
    assert [str(error) for error in errors] == ["image 40 is gone"] * 2


def rgb(*numbers):
    return np.array(numbers).reshape(3, 1, 1)


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
@pytest.mark.parametrize("name", [*normalize.NAMES, "0.1,.2,0.3/0.5"])
def test_normalized_images(name, kind):
    if kind == np.float32 and name in ("imagenet", "0.1,.2,0.3/0.5"):
        store = dl.ArrayDatastore(np.zeros((1, 3, 6, 5), kind))
        text = refusal(dl.data.normalization(name, store), store.images)
        assert text.startswith(f"normalization {name}: expected 8-bit images, found float32; ")
        assert refusal(dl.MinibatchQueue, store, 1, normalization=normalize.fixed(name, 3)) == text
        return
    images = (pixels_of(6, 45, 3, 6, 5) // 2 + 7).astype(kind)
    wide = images.astype(np.float64)
    store = dl.ArrayDatastore(images)
    normalization = dl.data.normalization(name, store)
    low, high = 0, 255
    if kind == np.float32:
        low, high = (f(wide, axis=(0, 2, 3), keepdims=True) for f in (np.min, np.max))
    mean = wide.mean(axis=(0, 2, 3), keepdims=True)
    expected = {
        "none": wide,
        "rescale-zero-one": wide / 255 if kind == np.uint8 else wide,
        "rescale-symmetric": 2 * (wide - low) / np.subtract(high, low) - 1,
        "imagenet": (wide / 255 - rgb(0.485, 0.456, 0.406)) / rgb(0.229, 0.224, 0.225),
        "0.1,.2,0.3/0.5": (wide / 255 - rgb(0.1, 0.2, 0.3)) / 0.5,
        "caffe": wide - rgb(123.68, 116.779, 103.939),
        "zerocenter": wide - mean,
        "zerocenter-element": wide - wide.mean(axis=0),
        "zscore": (wide - mean) / wide.std(axis=(0, 2, 3), keepdims=True),
    }[name]
    queue = dl.MinibatchQueue(store, 64, shuffle="never", normalization=normalization)
    ((batch, _),) = queue.epoch(0)
    assert abs(batch.local() - expected).max() < 1e-6 * abs(expected).max()
    assert np.array_equal(normalization(images), batch.local())
    restored = normalize.read(normalization.name, normalization.arrays(), 3)
    assert np.array_equal(restored(images), batch.local())


def test_the_mean_image_is_cut_as_the_images_are():
    images = pixels_of(7, 20, 1, 8, 9)
    store = dl.ArrayDatastore(images)
    options = {"normalization": dl.data.normalization("zerocenter-element", store), "crop": (4, 5)}
    ((batch, _),) = dl.MinibatchQueue(store, 20, shuffle="never", **options).epoch(0)
    expected = (images - images.mean(axis=0))[:, :, 2:6, 2:7]
    assert np.allclose(batch.local(), expected, atol=1e-4)
    text = refusal(dl.MinibatchQueue, store, crop=(9, 9))
    assert text.startswith("crop: expected images of at least 9x9 pixels, got 8x9")


def test_a_channel_without_variance_becomes_zero():
    for kind in (np.uint8, np.float32):
        images = np.stack([np.full((30, 4, 4), 119), pixels_of(8, 30, 4, 4)], axis=1).astype(kind)
        for name in ("zscore", "rescale-symmetric"):
            normalized = dl.data.normalization(name, dl.ArrayDatastore(images))(images)
            assert np.isfinite(normalized).all()
            if name == "zscore" or kind == np.float32:
                assert abs(normalized[:, 0]).max() < 1e-5


def test_normalizations_are_checked():
    store = dl.ArrayDatastore(pixels_of(9, 4, 1, 3, 3))
    assert "must be one of none, rescale" in refusal(dl.data.normalization, "zero", store)
    assert "found none" in refusal(dl.data.normalization, "zscore", store.subset([]))
    ones = dl.data.Normalization("zscore", np.ones(2, np.float32), np.ones(2, np.float32))
    text = refusal(dl.MinibatchQueue, store, normalization=ones)
    assert "expected statistics for images of shape (1, 3, 3)" in text
    for name, arrays in (
        ("zero", {}),
        ("zscore", {}),
        ("zscore", {"centre": np.zeros(1), "divisor": np.zeros(1)}),
        ("zscore", {"centre": np.zeros(1), "divisor": np.ones(2)}),
    ):
        with pytest.raises(ValueError, match="normalization"):
            normalize.read(name, arrays, 1)


def test_simulated_ranks_normalize_alike():
    store = dl.ArrayDatastore(pixels_of(10, 50, 3, 6, 6))
    normalization = dl.data.normalization("zscore", store)
    worlds = [SimpleNamespace(rank=rank, size=3) for rank in range(3)]
    queues = [dl.MinibatchQueue(store, 50, 1, w, normalization=normalization) for w in worlds]
    shares = [images.local() for queue in queues for images, _ in queue.epoch(0)]
    ((images, _),) = dl.MinibatchQueue(store, 50, 1, normalization=normalization).epoch(0)
    assert np.concatenate(shares).tobytes() == images.local().tobytes()
