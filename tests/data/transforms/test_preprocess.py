"""Preprocessing and normalization: against Pillow, by hand in float64, on any number of ranks."""

from fractions import Fraction
from types import SimpleNamespace

import datafiles
import numpy as np
import pytest
from image_sets import grow, on_ranks, pixels_of, refusal, save
from PIL import Image

import mpidl as dl
from mpidl.data.datastore import Datastore
from mpidl.data.transforms import normalize, preprocess


def picture(seed, height, width, mode):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(pixels_of(seed, *shape))


def array_of(image):
    found = np.asarray(image)
    return found[None] if found.ndim == 2 else found.transpose(2, 0, 1)


CASES = [
    ({}, lambda i: i),
    ({"size": (9, 14)}, lambda i: i.resize((14, 9), Image.Resampling.BILINEAR)),
    ({"colour": "gray"}, lambda i: i.convert("L")),
    ({"colour": "rgb"}, lambda i: i.convert("RGB")),
    ({"crop": (7, 8)}, lambda i: i.crop((6, 6, 14, 13))),
    (
        {"size": (30, 10), "cover": True, "crop": (30, 10)},
        lambda i: i.resize((30, 30), Image.Resampling.BILINEAR).crop((10, 0, 20, 30)),
    ),
    (
        {"size": (10, 11), "colour": "gray", "crop": (5, 5)},
        lambda i: i.convert("L").resize((11, 10), Image.Resampling.BILINEAR).crop((3, 2, 8, 7)),
    ),
]


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize(
    "options, expected", CASES, ids=lambda c: str(c) if isinstance(c, dict) else "by Pillow"
)
def test_files_and_arrays_are_treated_as_pillow_does(options, expected, mode):
    image, how = picture(1, 20, 20, mode), dl.Preprocess(**options)
    found, wanted = how.of_picture(image), array_of(expected(image))
    assert found.dtype == np.uint8 and np.array_equal(found, wanted)
    assert how.image_shape(array_of(image).shape) == found.shape
    stored = how.of_arrays(array_of(image)[None])
    assert np.array_equal(stored[0], wanted) and stored.flags.c_contiguous


def test_floats_are_resized_as_bytes_are():
    bytes_of = pixels_of(2, 3, 3, 40, 30)
    how = dl.Preprocess(size=(17, 19), colour="gray")
    found, floats = how.of_arrays(bytes_of), how.of_arrays(bytes_of.astype(np.float32))
    assert floats.dtype == np.float32 and floats.shape == (3, 1, 17, 19)
    assert abs(found - floats).max() < 1.6  # rounded as gray, and each way


def test_a_constant_stays_constant_and_a_ramp_a_ramp():
    flat = np.full((1, 1, 50, 40), 97, np.uint8)
    assert (dl.Preprocess(size=(7, 90)).of_arrays(flat) == 97).all()
    ramp = np.broadcast_to(np.arange(64, dtype=np.float32), (1, 1, 5, 64))
    half = dl.Preprocess(size=(5, 32)).of_arrays(ramp)[0, 0, 0]
    assert np.allclose(half[2:-2], np.arange(32)[2:-2] * 2 + 0.5)


@pytest.mark.parametrize(
    "shape, size", [((20, 40), (10, 20)), ((33, 50), (10, 16)), ((5, 9), (7, 7))]
)
def test_cover(shape, size):
    height, width = dl.Preprocess(size=size, cover=True).resized(*shape)
    assert height >= size[0] and width >= size[1] and (height, width)[height > size[0]] in size
    assert abs(height / width - shape[0] / shape[1]) < 0.06


@pytest.mark.parametrize("mode, size", [("RGB", (5000, 4000)), ("L", (4, 3)), ("RGB", (1, 1))])
def test_planes_of_large_and_small_pictures(mode, size):
    """A large one lies in several pieces of Pillow's memory."""
    image = Image.new(mode, size[::-1], (1, 2, 3) if mode == "RGB" else 1)
    image.putpixel((size[1] - 1, size[0] - 1), (7, 8, 9) if mode == "RGB" else 7)
    assert np.array_equal(preprocess.planes_of(image), array_of(image))


def test_what_preprocessing_refuses():
    for options, text in (
        ({"colour": "grey"}, "colour must be gray or rgb, got grey"),
        ({"size": 5}, "size: expected (height, width), got 5"),
        ({"crop": (0, 1)}, "crop: expected at least one pixel each way"),
    ):
        assert refusal(dl.Preprocess, **options).startswith(text)
    small = dl.Preprocess(crop=(9, 9))
    assert refusal(small.of_arrays, pixels_of(0, 1, 1, 8, 20)) == (
        "centre crop 9x9 (--centre-crop, or crop= in Python): expected images as large as that at "
        "least, found 8x20"
    )
    two = dl.Preprocess(colour="gray")
    assert refusal(two.of_arrays, pixels_of(0, 1, 2, 8, 8)) == (
        "colour gray (--colour, or colour= in Python): expected images of 1 or 3 channels, found 2"
    )


def test_a_preprocessed_set():
    images = pixels_of(3, 10, 3, 8, 12)
    store = dl.ArrayDatastore(images, np.arange(10))
    how = dl.Preprocess(size=(6, 6), colour="gray")
    made = dl.data.preprocessed(store, how)
    assert made.image_shape == (1, 6, 6) and len(made) == 10
    assert np.array_equal(made.read([7, 2]), how.of_arrays(images[[7, 2]]))
    assert made.labels.tolist() == list(range(10))
    assert made.describe() == "arrays, gray, resized to 6x6: 10 images of 1x6x6 in 10 classes"
    other = dl.data.preprocessed(store, dl.Preprocess(size=(6, 6), colour="gray", crop=(5, 6)))
    assert len({store.fingerprint(), made.fingerprint(), other.fingerprint()}) == 3
    assert dl.data.preprocessed(store, dl.Preprocess()) is store
    assert dl.data.preprocessed(made, how) is made
    text = refusal(dl.data.preprocessed, store, dl.Preprocess(crop=(9, 9)))
    assert text.startswith("arrays: 10 images of 3x8x12 in 10 classes: centre crop 9x9 (")


def test_a_set_knows_how_its_images_were_made(tmp_path):
    grow(tmp_path)
    how = dl.Preprocess(size=(3, 4), colour="rgb")
    folder = dl.ImageFolder(tmp_path, preprocess=how)
    for store in (
        folder,
        dl.data.preprocessed(dl.ImageFolder(tmp_path), how),
        dl.data.preprocessed(dl.ArrayDatastore(pixels_of(0, 9, 3, 6, 5), np.arange(9) % 3), how),
        folder.subset([5, 3]).subset([1]),
        folder.split(0.5)[1],
        dl.data.NodeCache(folder),
        dl.data.combined(folder, np.arange(9.0)),
    ):
        assert store.preprocess == how and store.image_shape == (3, 3, 4)
    # what a function did besides no file can tell
    assert folder.transform(np.copy).preprocess is None
    assert dl.ImageFolder(tmp_path).preprocess is None


def test_two_files_are_preprocessed_once(tmp_path):
    """What makes a difference: covering what was covered and cut would enlarge it."""
    pixels = pixels_of(0, 6, 20, 30, 3)
    for part in ("train", "test"):
        datafiles.hdf5(tmp_path / f"{part}.h5", pixels, [0, 1, 2] * 2)
    how = dl.Preprocess(size=(16, 16), cover=True, crop=(8, 8))
    expected = how.of_arrays(pixels.transpose(0, 3, 1, 2))
    for store in dl.data.open_data(str(tmp_path), preprocess=how):
        assert np.array_equal(store.read(range(6)), expected)


# statistics


def exact(images):
    """(mean image, mean, variance) of uint8 images in fractions, rounded once."""
    whole = images.astype(np.int64)
    mean_image = whole.sum(axis=0) / len(images)
    mean, variance = [], []
    for c in range(images.shape[1]):
        values, n = whole[:, c].ravel(), whole[:, c].size
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
    for found in on_ranks(ranks, lambda world: normalize.statistics(store, Gops(world))):
        assert np.array_equal(found.mean_image, expected[0])
        assert np.array_equal(found.mean, expected[1])
        assert np.array_equal(found.variance, expected[2])
        assert found.count == 70
        assert found.low.tolist() == images.min(axis=(0, 2, 3)).tolist()
        assert found.high.tolist() == images.max(axis=(0, 2, 3)).tolist()


class Gops:
    """A pretended world with what `statistics` asks of a real one."""

    def __init__(self, world):
        self.inner, self.rank, self.size = world, world.rank, world.size

    def raise_if_any(self, error):
        self.inner.raise_if_any(error)

    def gop(self, name, value):
        parts = self.inner.exchange(value)
        return getattr(np, name)(parts, axis=0)


def test_statistics_of_floats(world):
    """By the fold: the same bytes on one rank and on those that run this."""
    images = np.random.default_rng(0).normal(5, 2, (85, 3, 4, 6)).astype(np.float32)
    store = dl.ArrayDatastore(images)
    found, alone = normalize.statistics(store, world), normalize.statistics(store)
    wide = images.astype(np.float64)
    assert np.allclose(found.mean_image, wide.mean(axis=0), rtol=1e-14)
    assert np.allclose(found.mean, wide.mean(axis=(0, 2, 3)), rtol=1e-14)
    assert np.allclose(found.variance, wide.var(axis=(0, 2, 3)), rtol=1e-13)
    for name in ("mean_image", "mean", "variance", "low", "high"):
        assert getattr(found, name).tobytes() == getattr(alone, name).tobytes()


def test_statistics_of_bytes_on_real_ranks(world):
    images = pixels_of(5, 40, 1, 7, 7)
    found = normalize.statistics(dl.ArrayDatastore(images), world)
    assert np.array_equal(found.variance, exact(images)[2])


def test_an_image_that_cannot_be_read_ends_all_ranks():
    class Broken(Datastore):
        image_shape = (1, 2, 2)

        def __len__(self):
            return 64

        def read(self, indices):
            if 40 in indices:
                raise dl.UserError("image 40 is gone")
            return np.zeros((len(indices), 1, 2, 2), np.uint8)

    found = on_ranks(2, lambda world: normalize.statistics(Broken(), Gops(world)))
    assert [str(error) for error in found] == ["image 40 is gone"] * 2


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
@pytest.mark.parametrize("name", normalize.NAMES)
def test_what_a_network_sees(name, kind):
    images = (pixels_of(6, 45, 3, 6, 5) // 2 + 7).astype(kind)
    wide = images.astype(np.float64)
    store = dl.ArrayDatastore(images)
    found = dl.data.normalization(name, store)
    low, high = (
        (0, 255)
        if kind == np.uint8
        else (f(wide, axis=(0, 2, 3), keepdims=True) for f in (np.min, np.max))
    )
    mean = wide.mean(axis=(0, 2, 3), keepdims=True)
    expected = {
        "none": wide,
        "rescale-zero-one": wide / 255 if kind == np.uint8 else wide,
        "rescale-symmetric": 2 * (wide - low) / np.subtract(high, low) - 1,
        "zerocenter": wide - mean,
        "zerocenter-element": wide - wide.mean(axis=0),
        "zscore": (wide - mean) / wide.std(axis=(0, 2, 3), keepdims=True),
    }[name]
    ((seen, _),) = dl.MinibatchQueue(store, 64, shuffle="never", normalization=found).epoch(0)
    scale = abs(expected).max()
    assert abs(seen.local() - expected).max() < 1e-6 * scale
    assert np.array_equal(found(images), seen.local())
    again = normalize.read(found.name, found.arrays(), 3)
    assert np.array_equal(again(images), seen.local())


def test_a_mean_image_of_cut_images_is_cut_too():
    images = pixels_of(7, 20, 1, 8, 9)
    store = dl.ArrayDatastore(images)
    found = dl.data.normalization("zerocenter-element", store)
    queue = dl.MinibatchQueue(store, 20, shuffle="never", normalization=found, crop=(4, 5))
    ((seen, _),) = queue.epoch(0)
    expected = (images - images.mean(axis=0))[:, :, 2:6, 2:7]
    assert np.allclose(seen.local(), expected, atol=1e-4)
    text = refusal(dl.MinibatchQueue, store, crop=(9, 9))
    assert text.startswith("crop: expected images of at least 9x9 pixels, got 8x9")


def test_a_channel_without_variance_becomes_zero():
    for kind in (np.uint8, np.float32):
        images = np.stack([np.full((30, 4, 4), 119), pixels_of(8, 30, 4, 4)], axis=1).astype(kind)
        for name in ("zscore", "rescale-symmetric"):
            made = dl.data.normalization(name, dl.ArrayDatastore(images))(images)
            assert np.isfinite(made).all()
            if name == "zscore" or kind == np.float32:
                assert abs(made[:, 0]).max() < 1e-5


def test_normalizations_that_cannot_be():
    store = dl.ArrayDatastore(pixels_of(9, 4, 1, 3, 3))
    assert "must be one of none, rescale" in refusal(dl.data.normalization, "zero", store)
    empty = store.subset([])
    assert "found none" in refusal(dl.data.normalization, "zscore", empty)
    ones = dl.data.Normalization("zscore", np.ones(2, np.float32), np.ones(2, np.float32))
    assert "expected statistics of images (1, 3, 3)" in refusal(
        dl.MinibatchQueue, store, normalization=ones
    )
    for name, arrays in (
        ("zero", {}),
        ("zscore", {}),
        ("zscore", {"centre": np.zeros(1), "divisor": np.zeros(1)}),
        ("zscore", {"centre": np.zeros(1), "divisor": np.ones(2)}),
    ):
        with pytest.raises(ValueError, match="normalization"):
            normalize.read(name, arrays, 1)


def test_pretended_ranks_see_the_same(world):
    del world
    images = pixels_of(10, 50, 3, 6, 6)
    store = dl.ArrayDatastore(images)
    found = dl.data.normalization("zscore", store)
    parts = []
    for rank in range(3):
        ranks = SimpleNamespace(rank=rank, size=3)
        queue = dl.MinibatchQueue(store, 50, 1, ranks, normalization=found)
        parts += [seen.local() for seen, _ in queue.epoch(0)]
    ((whole, _),) = dl.MinibatchQueue(store, 50, 1, normalization=found).epoch(0)
    assert np.concatenate(parts).tobytes() == whole.local().tobytes()


@pytest.mark.usefixtures("world")
def test_images_of_other_sizes_for_a_trained_network(tmp_path):
    """preprocess=net.preprocess, which is None where there was none."""
    for i in range(4):
        save(tmp_path / "ab"[i % 2] / f"{i}.png", pixels_of(i, 1, 8 + i, 9))
    whole = dl.ImageFolder(tmp_path, preprocess=dl.Preprocess(size=(6, 5)))
    net = dl.Network([dl.Dense(2)], whole.image_shape)
    assert net.preprocess is None
    options = dl.TrainingOptions(epochs=1, verbose="off")
    dl.train(net, whole, options)
    assert net.preprocess == whole.preprocess
    again = dl.ImageFolder(tmp_path, preprocess=net.preprocess)
    assert dl.evaluate(net, again) == dl.evaluate(net, whole)
    text = refusal(dl.ImageFolder(tmp_path, preprocess=None).read, range(4))
    assert "for a trained network preprocess=net.preprocess" in text
