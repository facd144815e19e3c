"""The mini-batch queue: order, shares, lanes, and the thread that reads ahead."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from limits import settled

from mpidl.blocks import LANES, blocks_of
from mpidl.data import ArrayDatastore, MinibatchQueue
from mpidl.data.datastore import Datastore
from mpidl.errors import UserError

SIZES = (1, 2, 3, 5, 7)


def numbered(n, labels=True):
    """n images of 3x2x5 pixels, image i full of i."""
    images = np.repeat(np.arange(n, dtype=np.uint8), 30).reshape(n, 3, 2, 5)
    return ArrayDatastore(images, np.arange(n) if labels else None)


def worlds(size):
    return [SimpleNamespace(rank=rank, size=size) for rank in range(size)]


def prefetchers():
    return [t for t in threading.enumerate() if t.name.startswith("mpidl-prefetch")]


class Slow(Datastore):
    """Images that say when they are read, and fail at one index."""

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
    store = numbered(203)  # mini-batches of 80, 80 and 43; the last block holds 11 images
    queues = [MinibatchQueue(store, 80, 7, world, prefetch=prefetch) for world in worlds(size)]
    order = queues[0].order(4)
    seen = []
    for number, shares in enumerate(zip(*(q.epoch(4) for q in queues), strict=True)):
        wanted = order[number * 80 : number * 80 + 80]
        assert np.array_equal(np.concatenate([i.batch.indices for i, _ in shares]), wanted)
        assert np.array_equal(np.concatenate([x.local() for _, x in shares]), wanted)
        pixels = np.concatenate([images.local() for images, _ in shares])
        assert np.array_equal(pixels, store.read(wanted) / np.float32(255))
        for images, labels in shares:
            b = images.batch
            assert (b.count, b.epoch, b.seed) == (len(wanted), 4, 7)
            assert images.lanes.shape == (b.blocks, 3, 2, 5, LANES)
            assert images.dtype == np.float32 and images.lanes.flags.c_contiguous
            assert labels.lanes.shape == (b.blocks, LANES) and labels.dtype == np.int32
        seen.extend(wanted.tolist())
    assert sorted(seen) == list(range(203)) and number + 1 == len(queues[0]) == 3


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
    every = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    ((images, _),) = MinibatchQueue(ArrayDatastore(every)).epoch(0)
    assert np.array_equal(images.local(), every.astype(np.float32) / np.float32(255))
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
def test_start_does_not_read_what_is_before(prefetch):
    store = Slow(50)
    queue = MinibatchQueue(store, 8, prefetch=prefetch)
    whole = [images.batch.indices.tolist() for images, _ in queue.epoch(2)]
    store.reads.clear()
    assert [i.batch.indices.tolist() for i, _ in queue.epoch(2, start=4)] == whole[4:]
    assert store.reads == whole[4:]
    assert list(queue.epoch(2, start=7)) == []
    with pytest.raises(ValueError, match="from 0 to 7, got 8"):
        queue.epoch(2, start=8)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_thread_reads_so_far_ahead_and_no_farther(prefetch):
    store = Slow(40)
    batches = MinibatchQueue(store, 4, prefetch=prefetch).epoch(0)
    assert store.reads == []
    for used in range(1, 4):
        next(batches)
        assert settled(lambda: len(store.reads), used + prefetch)
    batches.close()


@pytest.mark.parametrize("prefetch, workers", [(0, 1), (1, 1), (2, 1), (3, 4)])
def test_a_mini_batch_that_is_gone_leaves_its_memory_to_the_next(prefetch, workers):
    """There are as many as were asked for and the one in use, whatever the threads do."""
    store = ArrayDatastore(np.ones((400, 1, 32, 32), np.uint8), np.zeros(400, int))
    batches, places = MinibatchQueue(store, 16, prefetch=prefetch, workers=workers).epoch(0), []
    for images, labels in batches:
        assert (images.lanes == np.float32(1) / np.float32(255)).all()
        places.append(images.lanes.ctypes.data)
        del images, labels
    assert len(places) == 25 and len(set(places)) <= prefetch + 1


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_error_comes_at_its_mini_batch(prefetch):
    store = Slow(40, broken=13)
    batches = MinibatchQueue(store, 4, shuffle="never", prefetch=prefetch).epoch(0)
    delivered = []
    with pytest.raises(UserError, match="folder/13.png"):
        for images, _ in batches:
            delivered.append(images.batch.indices.tolist())
    assert delivered == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert not prefetchers() and list(batches) == []


def test_thread_ends_with_the_loop():
    queue = MinibatchQueue(Slow(400), 4)
    for _ in queue.epoch(0):
        assert len(prefetchers()) == 1
        break
    assert settled(prefetchers, [])
    with pytest.raises(RuntimeError, match="user's own"):
        for _ in queue.epoch(0):
            raise RuntimeError("user's own")
    assert settled(prefetchers, [])
    assert len(list(queue.epoch(0))) == 100 and not prefetchers()
    never_started = queue.epoch(0)
    assert not prefetchers()
    del never_started


def test_plain_follows_the_world_and_can_be_set():
    store = numbered(40)
    for world_plain, given, expected in (
        (True, None, True),
        (True, False, False),
        (None, True, True),
    ):
        world = SimpleNamespace(rank=0, size=2)
        if world_plain is not None:
            world.plain = world_plain
        images, _ = next(MinibatchQueue(store, 40, world=world, plain=given).epoch(0))
        assert images.batch.tree.plain is expected and images.batch.world is world


def test_queue_says_what_it_cannot_use():
    store = numbered(4)
    with pytest.raises(UserError, match="^--batch-size must be at least 1, got 0$"):
        MinibatchQueue(store, 0)
    with pytest.raises(UserError, match="got ones: did you mean once"):
        MinibatchQueue(store, shuffle="ones")
    with pytest.raises(UserError, match="prefetch must be at least 0, got -1"):
        MinibatchQueue(store, prefetch=-1)
    empty = MinibatchQueue(store.subset([]))
    assert len(empty) == 0 and list(empty.epoch(0)) == []


def test_real_ranks_share_each_mini_batch(world):
    store = numbered(100)
    for images, labels in MinibatchQueue(store, 48, world=world).epoch(1):
        shares = world.gather((images.batch.indices, labels.local()))
        order = MinibatchQueue(store, 48).order(1)
        if world.rank == 0:
            indices, found = (np.concatenate(part) for part in zip(*shares, strict=True))
            assert np.array_equal(indices, found) and set(indices) <= set(order)
            assert len(indices) == images.batch.count
