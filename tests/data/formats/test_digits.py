"""Test the embedded digit set: its bytes, its difficulty, and its folder in the cache."""

import importlib
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mpidl.core import keyed
from mpidl.data import ArrayDatastore
from mpidl.data.formats.digit_glyphs import FACES, segments
from mpidl.errors import UserError

# `mpidl.data.digits` may be the function instead of the module.
module = importlib.import_module("mpidl.data.formats.digits")


@pytest.fixture(scope="module")
def drawn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # mpidl warns if the bytes are not the published bytes
        return module.draw()


STEP = 25  # every 25th image, 40 of each class
SAMPLE_SHA256 = "12b1c067e6942cbb066b706bab40cd17ab02fbb17c0af569fd6192d63bfd9330"


@pytest.fixture(scope="module")
def sample():
    """(images, labels) of every 25th image, because drawing all images takes seconds."""
    glyphs = [[module._glyph(face, digit) for face in FACES.values()] for digit in range(10)]
    labels = np.repeat(np.arange(10), module.PER_CLASS)[::STEP]
    return np.stack([module._image(glyphs[c], STEP * i) for i, c in enumerate(labels)]), labels


@pytest.fixture(scope="module")
def halves(drawn):
    """(training pixels, labels, test pixels, labels). Pixels are float32 (n, 784) in 0..1."""
    both = ArrayDatastore(*drawn).split(0.9, seed=0)
    return [
        part
        for half in both
        for part in (
            half.read(np.arange(len(half))).reshape(len(half), -1).astype(np.float32) / 255,
            half.labels,
        )
    ]


# The difficulty depends only on the bytes, which another test compares in every run.
def squared_distances(x, points):
    """Return squared distances (len(x), len(points)), minus a term that is constant in each row."""
    return (points * points).sum(axis=1) - 2 * (x @ points.T)


def test_a_sample_has_the_published_bytes(sample):
    assert module.sha256(*sample) == SAMPLE_SHA256


@pytest.mark.slow("jobs")
def test_bytes_are_the_published_ones(drawn, sample):
    images, labels = drawn
    for values, part in zip(drawn, sample, strict=True):
        assert np.array_equal(values[::STEP], part)
    assert images.shape == (10_000, 28, 28) and images.dtype == np.uint8
    assert labels.dtype == np.int64 and np.array_equal(labels, np.repeat(np.arange(10), 1000))
    assert module.sha256(images, labels) == module.SHA256
    assert len(np.unique(images.reshape(len(images), -1), axis=0)) == len(images)


def test_a_warning_reports_other_bytes(monkeypatch):
    monkeypatch.setattr(module, "SHA256", "0" * 64)
    monkeypatch.setattr(module, "PER_CLASS", 1)
    with pytest.warns(UserWarning, match="differs from the published set"):
        module.draw()


def test_faces_differ_and_every_segment_has_a_length():
    for digit in range(10):
        glyphs = [segments(face, digit) for face in FACES.values()]
        assert len({glyph.tobytes() for glyph in glyphs}) == len(FACES)
        for glyph in glyphs:
            assert (np.abs(glyph[:, 1] - glyph[:, 0]).max(axis=1) > 0).all()
            assert np.abs(np.ptp(glyph[..., 1]) - 1) < 0.1


@pytest.mark.parametrize(
    "digits", ["sample", pytest.param("drawn", marks=pytest.mark.slow("jobs"))]
)
def test_no_digit_is_cut_off(request, digits):
    # The outermost pixels contain noise and at most a trace of a stroke.
    images = request.getfixturevalue(digits)[0]
    rim = np.concatenate([images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]], axis=1)
    assert rim.max() < module.WHITE[0]


def nearest_class_mean(x, labels, test):
    means = np.stack([x[labels == digit].mean(axis=0) for digit in range(10)])
    return squared_distances(test, means).argmin(axis=1)


def linear_softmax(x, labels, test):
    middle = x.mean(axis=0)
    x = x - middle
    targets = np.eye(10, dtype=np.float32)[labels]
    weight, bias = np.zeros((784, 10), np.float32), np.zeros(10, np.float32)
    dweight, dbias = np.zeros_like(weight), np.zeros_like(bias)
    epochs = 30
    for epoch in range(epochs):
        rate = 0.02 * (1 - epoch / epochs)
        order = keyed.permutation(len(x), 0, "shuffle", epoch=epoch)
        for batch in order.reshape(-1, 100):
            score = x[batch] @ weight + bias
            p = np.exp(score - score.max(axis=1, keepdims=True))
            p = (p / p.sum(axis=1, keepdims=True) - targets[batch]) / len(batch)
            dweight = 0.9 * dweight + x[batch].T @ p
            dbias = 0.9 * dbias + p.sum(axis=0)
            weight -= np.float32(rate) * dweight
            bias -= np.float32(rate) * dbias
    return ((test - middle) @ weight + bias).argmax(axis=1)


def nearest_neighbour(x, labels, test):
    return labels[squared_distances(test, x).argmin(axis=1)]


@pytest.mark.slow("jobs")
@pytest.mark.parametrize(
    "classify, low, high",
    [(nearest_class_mean, 0.4, 0.75), (linear_softmax, 0.6, 0.93), (nearest_neighbour, 0.9, 0.99)],
)
def test_simple_classifiers_fail(halves, classify, low, high):
    *training_and_test, expected = halves
    accuracy = (classify(*training_and_test) == expected).mean()
    print(f"{classify.__name__}: {accuracy:.3f}")  # pytest -s
    assert low <= accuracy <= high


def test_folder_is_drawn_once_and_read_back(sample, tmp_path, monkeypatch):
    """A folder of 20 images per class is written once, and then read."""
    images, labels = (part.reshape(10, 1000 // STEP, -1)[:, :20] for part in sample)
    drawn = images.reshape(-1, 28, 28), labels.reshape(-1)
    monkeypatch.setattr(module, "draw", lambda: drawn)
    monkeypatch.setattr(module, "PER_CLASS", 20)
    store = module.digits(cache=tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [f"digits-{module.SHA256[:12]}"]
    assert store.classes == [str(digit) for digit in range(10)]
    assert store.image_shape == (1, 28, 28)
    assert np.array_equal(store.labels, drawn[1])
    assert np.array_equal(store.read(np.arange(200))[:, 0], drawn[0])

    monkeypatch.setattr(module, "draw", lambda: pytest.fail("drawn again"))
    monkeypatch.setenv("MPIDL_CACHE", str(tmp_path))
    assert module.digits().fingerprint() == store.fingerprint()
    os.remove(store.name(17))
    with pytest.raises(UserError, match="expected 200 images, found 199; remove the folder"):
        module.digits()


@pytest.fixture
def small(monkeypatch):
    """Make the digit set small: two images per class."""
    monkeypatch.setattr(module, "PER_CLASS", 2)
    monkeypatch.setattr(warnings, "warn", lambda *arguments, **options: None)


def test_two_jobs_at_once(small, tmp_path, monkeypatch):
    # Both jobs find no folder and draw the digits. Then both rename their folder.
    both_drawn = threading.Barrier(2)
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *paths: (both_drawn.wait(), rename(*paths)))
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(module.digits, cache=tmp_path) for _ in range(2)]
        assert [len(job.result()) for job in jobs] == [20, 20]
    assert [entry.name for entry in tmp_path.iterdir()] == [f"digits-{module.SHA256[:12]}"]


def test_a_folder_that_a_killed_job_left_is_ignored(small, tmp_path):
    (tmp_path / "unfinished-abc" / "digits" / "0").mkdir(parents=True)
    assert len(module.digits(cache=tmp_path)) == 20


def test_default_cache(monkeypatch):
    monkeypatch.setenv("HOME", "/home/a")
    monkeypatch.delenv("MPIDL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert module._default_cache() == "/home/a/.cache/mpidl"
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/a/x")
    assert module._default_cache() == "/home/a/x/mpidl"
    monkeypatch.setenv("MPIDL_CACHE", "/home/a/y")
    assert module._default_cache() == "/home/a/y"


def test_all_ranks_share_one_folder(small, world, tmp_path):
    cache = world.broadcast(str(tmp_path))
    store = module.digits(world, cache=cache if world.rank == 0 else "elsewhere")
    assert store.folder.startswith(cache) and len(store) == 20
    assert store.describe() == "digits: 20 images of 1x28x28 in 10 classes"
    world.barrier()


def test_a_cache_that_cannot_be_written_is_one_error_on_all_ranks(small, world, tmp_path):
    # A file is where the folder should be. A read-only folder would not stop root from writing.
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the digit set to .*file.*MPIDL_CACHE"):
        module.digits(world, cache=tmp_path / "file" / "cache")
