"""Test unreadable images: mini-batches skip the same images on any number of ranks."""

import numpy as np
import pytest
from image_sets import ReadArrays, pixels_of, refusal

import mpidl as dl
from mpidl.data.agreement import agreed
from mpidl.data.datastore import Derived
from mpidl.data.loading.bad_images import BadImages, unreadable
from mpidl.errors import StorageFault, UserError


class Damaged(Derived):
    """A set in which some images cannot be read."""

    def __init__(self, parent, *bad):
        super().__init__(parent)
        self.bad, self.reads = set(bad), 0

    def read(self, indices):
        self.reads += len(indices)
        for i in indices:
            if int(i) in self.bad:
                raise UserError(f"{self.located(i)}: damaged")
        return self.parent.read(indices)


def pictures(count):
    return ReadArrays(pixels_of(3, count, 1, 4, 5), labels=np.arange(count) % 3)


def batches(world, store, bad_images, epochs=(1,), **options):
    """Return a list of (indices of the global mini-batch, pixels, labels), one per mini-batch."""
    queue = dl.MinibatchQueue(store, 40, 5, world, bad_images=bad_images, **options)
    result = []
    for epoch in epochs:
        for images, labels in agreed(queue.epoch(epoch), world):
            shares = world.allgather((images.batch.indices, images.local(), labels.local()))
            assert images.batch.count == sum(len(indices) for indices, *_ in shares)
            result.append(tuple(map(np.concatenate, zip(*shares, strict=True))))
    return result


@pytest.mark.parametrize(("prefetch", "workers"), [(0, 1), (2, 1), (3, 4)])
def test_a_mini_batch_without_its_bad_images(world, prefetch, workers):
    """All other images arrive once per epoch, in the usual order, with the correct labels."""
    bad, store = [0, 7, 51, 99], pictures(100)
    bad_images = BadImages()
    options = {"prefetch": prefetch, "workers": workers}
    got = batches(world, Damaged(store, *bad), bad_images, (1, 2), **options)
    assert sorted(bad_images.reasons) == bad
    assert bad_images.reasons[51] == "image 51: damaged"
    expected = batches(world, store, None, (1, 2))
    assert len(got) == len(expected) == 6
    for (indices, pixels, labels), (all_indices, all_pixels, all_labels) in zip(
        got, expected, strict=True
    ):
        is_readable = ~np.isin(all_indices, bad)
        assert np.array_equal(indices, all_indices[is_readable])
        assert np.array_equal(pixels, all_pixels[is_readable])
        assert np.array_equal(labels, all_labels[is_readable])


def test_known_images_are_not_read_again(world):
    store, bad_images = Damaged(pictures(100), 3, 60), BadImages()
    batches(world, store, bad_images)
    store.reads = 0
    batches(world, store, bad_images, (2,))
    assert world.gop("sum", store.reads) == 98


def test_without_bad_images_the_error_stops_all_ranks(world):
    text = refusal(batches, world, Damaged(pictures(100), 99), None)
    assert text == "image 99: damaged"


def test_a_mini_batch_without_any_image(world):
    store = Damaged(pictures(100), *range(100))
    text = refusal(batches, world, store, BadImages())
    assert text.startswith(
        "ReadArrays: 100 images of 1x4x5 in 3 classes: expected a mini-batch with "
    )
    assert "with images, but none of the 40 images can be read; the first: image " in text


def test_a_store_that_does_not_answer_is_no_bad_image(world):
    class Silent(Derived):
        def read(self, indices):
            raise StorageFault("no answer")

    with pytest.raises(StorageFault, match="no answer"):
        batches(world, Silent(pictures(50)), BadImages())


def test_an_error_that_passes_costs_no_image():
    """If a read fails but each image can be read separately, all images are read together again."""
    calls = []

    def read(indices):
        calls.append(len(indices))
        if len(calls) == 1:
            raise UserError("for a moment")

    assert unreadable(read, np.arange(3)) == {} and calls == [3, 1, 1, 1, 3]

    def never_together(indices):
        if len(indices) > 1:
            raise UserError("together")

    with pytest.raises(UserError, match="together"):
        unreadable(never_together, np.arange(3))


def test_functions_of_the_user_see_only_images_that_can_be_read(world):
    indices_read = []

    def function(images, labels, keys):
        indices_read.extend(keys.indices)
        return images

    batches(world, Damaged(pictures(100), 20), BadImages(), function=function)
    assert 20 not in indices_read


def test_search_reads_each_image_once(world):
    store, bad_images = Damaged(pictures(150), 5, 149), BadImages()
    bad_images.search(store, world)
    assert sorted(bad_images.reasons) == [5, 149]
    usable = bad_images.usable(store)
    assert len(usable) == 148 and usable.name(5) == "image 6"
    assert BadImages().usable(store) is store


def test_evaluation_covers_the_other_images(world):
    store = pictures(40)
    net = dl.Network([dl.Dense(3)], (1, 4, 5), seed=1)
    bad_images = BadImages()
    bad = [1, 17, 39]
    got = dl.evaluate(net, Damaged(store, *bad), world=world, bad_images=bad_images, confusion=True)
    usable = store.subset(np.setdiff1d(np.arange(40), bad))
    expected = dl.evaluate(net, usable, world=world, confusion=True)
    assert got[:3] == expected[:3] and got.images == 37 and sorted(bad_images.reasons) == bad
    assert np.array_equal(got.confusion.counts, expected.confusion.counts)
