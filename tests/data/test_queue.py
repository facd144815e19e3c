"""Test the mini-batch queue: order, shares, lanes, memory, and prefetching."""

from types import SimpleNamespace

import numpy as np
import pytest
from cpu_builds import needs_kernels
from image_sets import refusal
from limits import settled
from single_rank import numbers

from mpidl.core.blocks import LANES, blocks_of
from mpidl.data import ArrayDatastore, Augmenter, MinibatchQueue, queue
from mpidl.data.datastore import Datastore
from mpidl.data.transforms.normalize import Normalization
from mpidl.errors import UserError

SIZES = (1, 2, 3, 5, 7)


def numbered(n, labels=True):
    """Return n images of 3x2x5 pixels. All pixels of image i are i."""
    images = np.repeat(np.arange(n, dtype=np.uint8), 30).reshape(n, 3, 2, 5)
    return ArrayDatastore(images, np.arange(n) if labels else None)


def worlds(size):
    return [SimpleNamespace(rank=rank, size=size) for rank in range(size)]


class Recording(Datastore):
    """A dataset that records which images are read, and fails at one index."""

    image_shape, dtype, classes = (1, 1, 1), np.dtype(np.uint8), ["a"]

    def __init__(self, n, broken=None):
        self.labels, self.broken, self.reads = np.zeros(n, np.int64), broken, []

    def read(self, indices):
        self.reads.append(list(indices))
        if self.broken in indices:
            raise UserError(f"folder/{self.broken}.png: the image cannot be read")
        return np.zeros((len(indices), 1, 1, 1), np.uint8)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("size", SIZES)
def test_shares_of_all_ranks_are_the_global_order(size, prefetch):
    store = numbered(203)  # mini-batches of 80, 80 and 43 images; the last block has 11 images
    queues = [MinibatchQueue(store, 80, 7, world, prefetch=prefetch) for world in worlds(size)]
    order = queues[0].order(4)
    indices = []
    for number, shares in enumerate(zip(*(q.epoch(4) for q in queues), strict=True)):
        expected = order[number * 80 : number * 80 + 80]
        assert np.array_equal(np.concatenate([i.batch.indices for i, _ in shares]), expected)
        assert np.array_equal(np.concatenate([x.local() for _, x in shares]), expected)
        pixels = np.concatenate([images.local() for images, _ in shares])
        assert np.array_equal(pixels, store.read(expected) / np.float32(255))
        for images, labels in shares:
            b = images.batch
            assert (b.count, b.epoch, b.seed) == (len(expected), 4, 7)
            assert images.lanes.shape == (b.blocks, 3, 2, 5, LANES)
            assert images.dtype == np.float32 and images.lanes.flags.c_contiguous
            assert labels.lanes.shape == (b.blocks, LANES) and labels.dtype == np.int32
        indices.extend(expected.tolist())
    assert sorted(indices) == list(range(203)) and number + 1 == len(queues[0]) == 3


def test_unused_lanes_are_zero_and_empty_shares_have_no_blocks():
    store = ArrayDatastore(np.full((21, 2, 2), 255, np.uint8), np.ones(21, int))
    blocks = []
    for world in worlds(5):
        ((images, labels),) = MinibatchQueue(store, 64, world=world).epoch(0)
        blocks.append(images.batch.blocks)
        assert images.lanes.shape == (blocks[-1], 1, 2, 2, LANES)
        used = np.arange(LANES) < (16 if world.rank == 0 else 5)
        assert np.array_equal(images.lanes, np.broadcast_to(used, images.lanes.shape))
        assert np.array_equal(labels.lanes, np.broadcast_to(used, labels.lanes.shape))
    assert blocks == [1, 1, 0, 0, 0] and blocks_of(21) == 2


def test_pixels_are_divided_and_floats_are_not():
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    ((images, _),) = MinibatchQueue(ArrayDatastore(pixels)).epoch(0)
    assert np.array_equal(images.local(), pixels.astype(np.float32) / np.float32(255))
    floats = np.random.default_rng(0).normal(size=(20, 3, 2, 2))
    ((images, labels),) = MinibatchQueue(ArrayDatastore(floats), shuffle="never").epoch(0)
    assert np.array_equal(images.local(), floats.astype(np.float32)) and labels is None
    assert images.dtype == np.float32 and not images.lanes[-1, ..., 4:].any()


def test_shuffles():
    def order(shuffle, epoch, seed=0):
        return MinibatchQueue(numbered(60), seed=seed, shuffle=shuffle).order(epoch).tolist()

    assert order("never", 3) == list(range(60))
    assert order("once", 3) == order("once", 0) == order("every-epoch", 0)
    different = [order("every-epoch", 1), order("every-epoch", 2), order("every-epoch", 1, seed=1)]
    assert len({tuple(o) for o in different}) == 3
    assert all(sorted(o) == list(range(60)) for o in different)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_start_skips_mini_batches_unread(prefetch):
    store = Recording(50)
    queue = MinibatchQueue(store, 8, prefetch=prefetch)
    indices = [images.batch.indices.tolist() for images, _ in queue.epoch(2)]
    store.reads.clear()
    assert [i.batch.indices.tolist() for i, _ in queue.epoch(2, start=4)] == indices[4:]
    assert store.reads == indices[4:]
    assert list(queue.epoch(2, start=7)) == []
    with pytest.raises(ValueError, match="between 0 and 7, got 8"):
        queue.epoch(2, start=8)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_the_queue_reads_as_far_ahead_as_prefetch(prefetch):
    store = Recording(40)
    batches = MinibatchQueue(store, 4, prefetch=prefetch).epoch(0)
    assert store.reads == []
    for used in range(1, 4):
        next(batches)
        assert settled(lambda: len(store.reads), used + prefetch)
    batches.close()


@pytest.mark.parametrize("prefetch, workers", [(0, 1), (1, 1), (2, 1), (3, 4)])
def test_mini_batches_reuse_memory(prefetch, workers):
    """Memory holds at most `prefetch` mini-batches and the mini-batch in use."""
    store = ArrayDatastore(np.ones((400, 1, 32, 32), np.uint8), np.zeros(400, int))
    batches, places = MinibatchQueue(store, 16, prefetch=prefetch, workers=workers).epoch(0), []
    for images, labels in batches:
        assert (images.lanes == np.float32(1) / np.float32(255)).all()
        places.append(images.lanes.ctypes.data)
        del images, labels
    assert len(places) == 25 and len(set(places)) <= prefetch + 1


def test_an_error_is_raised_at_its_mini_batch():
    batches = MinibatchQueue(Recording(40, broken=13), 4, shuffle="never").epoch(0)
    assert [next(batches)[0].batch.indices[0] for _ in range(3)] == [0, 4, 8]
    assert refusal(next, batches) == "folder/13.png: the image cannot be read"


def test_plain_follows_the_world_unless_it_is_set():
    store = numbered(40)
    cases = [(True, None, True), (True, False, False), (None, True, True)]
    for world_plain, plain, expected in cases:
        world = SimpleNamespace(rank=0, size=2)
        if world_plain is not None:
            world.plain = world_plain
        images, _ = next(MinibatchQueue(store, 40, world=world, plain=plain).epoch(0))
        assert images.batch.tree.plain is expected and images.batch.world is world


def test_arguments_are_checked():
    store = numbered(4)
    assert refusal(MinibatchQueue, store, 0) == "--batch-size must be at least 1, got 0"
    assert "got ones: did you mean once" in refusal(MinibatchQueue, store, shuffle="ones")
    assert "prefetch must be at least 0, got -1" in refusal(MinibatchQueue, store, prefetch=-1)
    assert refusal(MinibatchQueue, store, workers=0) == "workers must be at least 1, got 0"
    empty = MinibatchQueue(store.subset([]))
    assert len(empty) == 0 and list(empty.epoch(0)) == []


@pytest.mark.parametrize("sampling", ["global", "partition"])
def test_the_partial_mini_batch_is_discarded(sampling):
    """Complete mini-batches are the same as in a queue that keeps the partial mini-batch."""
    store, options = numbered(203), {"sampling": sampling, "prefetch": 0}
    for size in (1, 3):
        for world in worlds(size):
            complete = MinibatchQueue(store, 80, 7, world, **options)
            queue = MinibatchQueue(store, 80, 7, world, partial_minibatch="discard", **options)
            assert (len(complete), len(queue)) == (3, 2)
            for epoch in (1, 2):
                assert np.array_equal(queue.order(epoch), complete.order(epoch)[:160])
            expected = [labels.local() for _, labels in complete.epoch(2)]
            labels_of_batches = [labels.local() for _, labels in queue.epoch(2)]
            assert len(labels_of_batches) == 2 and list(queue.epoch(2, start=2)) == []
            assert all(map(np.array_equal, labels_of_batches, expected))
    omitted = [set(range(203)) - set(queue.order(epoch).tolist()) for epoch in (1, 2)]
    assert len(omitted[0]) == 43 and omitted[0] != omitted[1]


def test_a_discarded_mini_batch_leaves_at_least_one():
    text = refusal(MinibatchQueue, numbered(4), 5, partial_minibatch="discard")
    assert text.endswith(
        "4 classes: --partial-minibatch discard: expected images for at least one mini-batch of "
        "5, found 4"
    )
    for size, count in ((4, 1), (2, 2)):
        assert len(MinibatchQueue(numbered(4), size, partial_minibatch="discard")) == count
    text = refusal(MinibatchQueue, numbered(4), partial_minibatch="drop")
    assert text == "partial_minibatch must be one of return, discard, got drop"


def test_ranks_share_each_mini_batch(world):
    store = numbered(100)
    for images, labels in MinibatchQueue(store, 48, world=world).epoch(1):
        shares = world.gather((images.batch.indices, labels.local()))
        order = MinibatchQueue(store, 48).order(1)
        if world.rank == 0:
            indices, values = (np.concatenate(part) for part in zip(*shares, strict=True))
            assert np.array_equal(indices, values) and set(indices) <= set(order)
            assert len(indices) == images.batch.count


class Doubled(ArrayDatastore):
    """A subclass that changes the pixels of the array."""

    def read(self, indices):
        return super().read(indices) * 2


@needs_kernels
def test_floats_in_memory_are_converted_without_a_copy(monkeypatch):
    images = numbers("floats", 40, 1, 5, 7, high=9).astype(np.float32)
    labels, reads = np.arange(40) % 3, []
    read = ArrayDatastore.read
    monkeypatch.setattr(
        ArrayDatastore, "read", lambda self, indices: reads.append(1) or read(self, indices)
    )
    stores = [ArrayDatastore(images, labels), Doubled(images / 2, labels)]
    batches = [list(MinibatchQueue(store, 24, classes=3).epoch(1)) for store in stores]
    assert len(reads) == 2  # only the two mini-batches of the second set
    for pairs in zip(*batches, strict=True):
        for values in zip(*pairs, strict=True):
            assert values[0].lanes.tobytes() == values[1].lanes.tobytes()


@needs_kernels
def test_invalid_floats_in_memory_are_reported():
    images = np.zeros((20, 1, 4, 4), np.float32)
    images[7] = np.nan
    with pytest.raises(UserError, match="image 7: expected finite pixels, found nan"):
        list(MinibatchQueue(ArrayDatastore(images, np.zeros(20, int)), 20).epoch(1))
    images[7] = 0
    with pytest.raises(UserError, match="image 9: expected labels from 0 to 2, found 5"):
        labels = np.where(np.arange(20) == 9, 5, 0)
        list(MinibatchQueue(ArrayDatastore(images, labels), 20, classes=3).epoch(1))


def test_threads_prepare_only_mini_batches_that_are_worth_it(monkeypatch):
    started = []
    monkeypatch.setattr(queue, "prefetch_items", lambda jobs, *_: started.append(1) or iter([]))
    store = ArrayDatastore(np.zeros((600, 1, 30, 30), np.float32))
    for batch, is_started in ((16, False), (600, True)):
        list(MinibatchQueue(store, batch).epoch(1))
        assert bool(started) == is_started
    started.clear()
    list(MinibatchQueue(store, 16, augmenter=Augmenter(brightness=0.2)).epoch(1))
    assert started


def epoch_sums(queue, epoch):
    return [images.lanes.sum() for images, _ in queue.epoch(epoch)]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_images_that_are_replaced_between_epochs(dtype):
    store = ArrayDatastore(np.ones((40, 1, 2, 2), dtype))
    queue = MinibatchQueue(store, 16)
    before = epoch_sums(queue, 1)
    store.images = store.images * 2
    assert epoch_sums(queue, 2) == [2 * value for value in before]


def test_a_set_that_is_longer_than_its_array():
    class Repeated(ArrayDatastore):
        def __len__(self):
            return 1000 * len(self.images)

        def read(self, indices):
            return super().read(np.asarray(indices) % len(self.images))

    class Unbounded(ArrayDatastore):
        def __len__(self):
            return 1000 * len(self.images)

    images = np.ones((20, 1, 2, 2), np.float32)
    lanes = next(MinibatchQueue(Repeated(images), 32).epoch(1))[0].lanes
    assert (lanes == 1).all()
    with pytest.raises(IndexError):
        next(MinibatchQueue(Unbounded(images), 32).epoch(1))


def test_a_read_method_of_the_instance_is_called():
    store = ArrayDatastore(np.ones((16, 1, 2, 2), np.float32))
    store.read = lambda indices: np.zeros((len(indices), 1, 2, 2), np.float32)
    assert epoch_sums(MinibatchQueue(store, 16), 1) == [0]


def test_the_load_may_be_a_list():
    store = ArrayDatastore(np.ones((20, 1, 2, 2), np.float32))
    assert len([*MinibatchQueue(store, 20, load=[1]).epoch(1)]) == 1


def test_labels_that_are_removed_between_epochs():
    store = ArrayDatastore(np.ones((20, 1, 2, 2), np.float32), np.arange(20) % 2)
    queue = MinibatchQueue(store, 20)
    assert next(queue.epoch(1))[1].lanes.any()
    store.labels = None
    assert (next(queue.epoch(1))[0].lanes.sum(axis=(0, 4)) == 20).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_normalization_that_is_replaced_between_epochs(dtype):
    store = ArrayDatastore(np.ones((20, 1, 2, 2), dtype))
    queue = MinibatchQueue(store, 20)
    (before,) = epoch_sums(queue, 1)
    half, four = np.float32([0.5]), np.float32([4])
    queue.pipeline.normalization = Normalization("zscore", half, four)
    assert epoch_sums(queue, 2) == [20 * 4 * 0.125] != [before]
