"""Test class-balanced sampling: counts per class and image, keys, shares, and bad images."""

from types import SimpleNamespace

import numpy as np
import pytest
from image_sets import refusal

import mpidl as dl
from mpidl.data import ArrayDatastore, BadImages, MinibatchQueue, balanced
from mpidl.data.datastore import Derived
from mpidl.data.loading.bad_images import Unreadable
from mpidl.errors import UserError

SIZES = {0: 2, 1: 11, 3: 40, 4: 1}  # class 2 has no images
LABELS = np.repeat(list(SIZES), list(SIZES.values()))[np.random.default_rng(0).permutation(54)]
PER_CLASS = 14  # ceil(54 / 4)


def numbered(labels=LABELS):
    """Images of 1x2x2 pixels. All pixels of image i are i."""
    count = len(labels)
    images = np.repeat(np.arange(count, dtype=np.uint8), 4).reshape(count, 1, 2, 2)
    return ArrayDatastore(images, labels, "abcde")


def queue(world=None, batch_size=16, **options):
    return MinibatchQueue(
        numbered(), batch_size, 5, world, sampling="balanced", prefetch=0, **options
    )


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_every_class_and_every_image_of_a_class_equally_often(epoch):
    samples = balanced.draw(LABELS, 5, epoch)
    assert len(samples) == balanced.epoch_length(LABELS) == 4 * PER_CLASS
    assert len(set(samples)) == len(samples)  # each copy of an image has its own random numbers
    images, copies = samples % 54, samples // 54
    assert np.bincount(LABELS[images], minlength=5).tolist() == [14, 14, 0, 14, 14]
    counts = np.bincount(images, minlength=54)
    for label, size in SIZES.items():
        low, remainder = divmod(PER_CLASS, size)
        expected = [low] * (size - remainder) + [low + 1] * remainder
        assert sorted(counts[LABELS == label]) == expected
    for image in range(54):
        assert sorted(copies[images == image]) == list(range(counts[image]))


def test_draws_depend_on_seed_and_epoch_alone():
    first = balanced.draw(LABELS, 5, 1)
    assert np.array_equal(first, balanced.draw(LABELS, 5, 1))
    for seed, epoch in ((5, 2), (6, 1)):
        other = balanced.draw(LABELS, seed, epoch)
        assert not np.array_equal(first, other)
        assert set(first % 54) != set(other % 54)  # different images of the large class
    assert not np.array_equal(LABELS[first % 54], np.sort(LABELS[first % 54]))


def test_each_image_of_a_large_class_is_drawn_in_some_epoch():
    drawn = {int(i) for epoch in range(1, 30) for i in balanced.draw(LABELS, 5, epoch) % 54}
    assert drawn == set(range(54))


def test_sample_numbers_fit_32_bits():
    labels = np.zeros(100_000, np.int64)
    labels[-1] = 1  # 50,000 copies of one image
    samples = balanced.draw(labels, 0, 1)
    assert samples.max() < 2**31 and len(samples) == 100_000
    assert (samples % 100_000 == 99_999).sum() == 50_000


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_shares_of_all_ranks_are_the_global_order(size, prefetch):
    worlds = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    queues = [
        MinibatchQueue(numbered(), 20, 5, w, prefetch=prefetch, workers=2, sampling="balanced")
        for w in worlds
    ]
    order, pieces = queues[0].order(3), []
    for shares in zip(*(q.epoch(3) for q in queues), strict=True):
        for images, labels in shares:
            samples = images.batch.indices
            pieces.append(samples)
            assert np.array_equal(images.local()[:, 0, 0, 0] * 255, samples % 54)
            assert np.array_equal(labels.local(), LABELS[samples % 54])
    assert np.array_equal(np.concatenate(pieces), order) and len(queues[0]) == 3
    resumed = [images.batch.indices for images, _ in queues[0].epoch(3, start=1)]
    uninterrupted = [images.batch.indices for images, _ in queues[0].epoch(3)]
    assert all(map(np.array_equal, resumed, uninterrupted[1:]))


def test_lengths_and_partial_mini_batches():
    assert len(queue(batch_size=56)) == 1 and len(queue(batch_size=55)) == 2
    full = queue(batch_size=20, partial_minibatch="discard")
    assert len(full) == 2 and len(full.order(1)) == 40
    assert len(queue(batch_size=56, partial_minibatch="discard")) == 1
    text = refusal(queue, batch_size=57, partial_minibatch="discard")
    assert text.endswith("at least one mini-batch of 57, found 56")


def test_shuffle_once_repeats_the_first_draws():
    fixed = queue(shuffle="once")
    assert np.array_equal(fixed.order(1), fixed.order(2))
    assert not np.array_equal(queue().order(1), queue().order(2))


def test_copies_of_an_image_are_augmented_differently():
    """The 14 copies of the only image of class 4 are shifted by different random numbers."""
    store = ArrayDatastore(
        np.arange(54 * 64, dtype=np.uint32).reshape(54, 8, 8).astype(np.uint8), LABELS, "abcde"
    )
    augmenter = dl.Augmenter(translate_x=3, translate_y=3)
    batches = MinibatchQueue(store, 16, 5, sampling="balanced", augmenter=augmenter).epoch(1)
    copies = [images.local()[labels.local() == 4] for images, labels in batches]
    assert len({image.tobytes() for image in np.concatenate(copies)}) > 7


def test_unreadable_images_are_left_out_with_all_copies():
    class Damaged(Derived):
        def read(self, indices):
            for i in indices:
                if LABELS[i] == 4:
                    raise UserError(f"{self.located(int(i))}: damaged")
            return self.parent.read(indices)

    bad = BadImages()
    batches = MinibatchQueue(
        Damaged(numbered()), 56, 5, sampling="balanced", bad_images=bad, prefetch=0
    ).epoch(1)
    item = next(batches)
    (only,) = np.nonzero(LABELS == 4)[0]
    assert isinstance(item, Unreadable) and list(item.reasons) == [only]
    images, labels = batches.send([item.reasons])
    assert images.batch.count == 42 and 4 not in labels.local()


def test_refusals():
    text = refusal(queue, shuffle="never")
    assert text == "--sampling balanced and --shuffle never: expected a random order"
    assert refusal(dl.TrainingOptions, sampling="balanced", shuffle="never") == text
    for options in (
        {"class_weights": "balanced"},
        {"class_weights": "balanced", "loss": "crossentropy+dice"},
        {"loss": dl.CrossEntropy("balanced")},
        {"loss": "binary-crossentropy", "positive_weights": "balanced"},
    ):
        dl.TrainingOptions(**options)
        text = refusal(dl.TrainingOptions, sampling="balanced", **options)
        flag = "positive" if "positive_weights" in options else "class"
        assert text.startswith(f"--sampling balanced and --{flag}-weights balanced: expected at")
    dl.TrainingOptions(sampling="balanced", class_weights="1,2")
    plain = ArrayDatastore(np.zeros((4, 2, 2), np.uint8))
    for store in (plain, dl.data.combined(numbered(), np.zeros(54))):
        text = refusal(MinibatchQueue, store, 2, sampling="balanced")
        assert text.endswith("--sampling balanced: expected images with one label each")
