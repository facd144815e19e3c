"""Test how --cache-mb is divided between mini-batches and cached images, and the memory in use."""

from types import SimpleNamespace

import numpy as np
import pytest

import mpidl as dl
from mpidl.backends.cpu import arenas
from mpidl.data import NodeCache, queue
from mpidl.data.datastore import Datastore
from mpidl.training import memory_budget, run

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


class Drawn(Datastore):
    """A datastore that generates images when they are read."""

    image_shape, classes = SHAPE, ["a", "b"]

    def __init__(self, count, targets_shape=None):
        self.labels, self.targets_shape = np.arange(count) % 2, targets_shape

    def read(self, indices):
        return np.stack([np.full(SHAPE, i % 256, np.uint8) for i in indices])


def world_of(hosts, device=None):
    return SimpleNamespace(rank=0, size=len(hosts), hosts=list(hosts), device=device)


def cache_bytes(hosts="a", count=1000, store=None, device=None, **options):
    """Return the bytes for decoded images, with --cache-mb 10 by default."""
    options = dl.TrainingOptions(**{"batch_size": 64, "cache_mb": 10, **options})
    store = Drawn(count) if store is None else store
    return memory_budget.for_images(options, store, world_of(hosts, device))


def reserved(**options):
    """Return the bytes of --cache-mb 10 reserved for prefetched mini-batches and for reading."""
    return 10 * 10**6 - cache_bytes(**options)


# Bytes of a mini-batch (float32 pixels and labels), and of pixels being read (two uint8 copies).
BATCH, READ = 64 * 4 * (PIXELS + 1), 2 * 64 * PIXELS


def test_mini_batches_made_ahead_are_counted_first():
    assert reserved() == 2 * BATCH + READ
    assert reserved(prefetch=5) == 5 * BATCH + READ
    assert reserved(prefetch=0) == reserved(count=64) == reserved(count=64, workers=3) == READ
    assert reserved(count=65) == BATCH + READ  # an epoch has only two mini-batches
    assert reserved(batch_size=60) == reserved()  # memory is reserved for whole blocks
    assert reserved(random_crop="16x16") == 2 * 64 * 4 * (3 * 16 * 16 + 1) + READ
    pairs = Drawn(1000, targets_shape=(2, 5))
    assert reserved(store=pairs) == 2 * 64 * 4 * (PIXELS + 10) + READ
    # On a GPU, 8 more mini-batches are in pinned memory.
    assert reserved(device="a GPU") == 10 * 64 * (PIXELS + 4) + READ
    assert cache_bytes(cache_mb=2, prefetch=1) == 2 * 10**6 - BATCH - READ
    assert cache_bytes(cache_mb=1) == cache_bytes(cache_mb=0) == 0


def test_the_ranks_of_a_node_share_mini_batches():
    bytes_of_node = reserved()
    assert [reserved(hosts="a" * n) for n in (2, 3, 4, 9)] == [bytes_of_node] * 4
    assert reserved(hosts="abcd") == reserved(hosts="ababcdcd", batch_size=128) / 2
    assert reserved(hosts="abcd") == bytes_of_node / 4
    # Of 4 blocks, rank 0 has 2 and rank 1 has 1.
    assert reserved(hosts="aab") == 3 / 4 * bytes_of_node
    assert reserved(hosts="ab", worker_load="1,3") == 3 / 4 * bytes_of_node
    assert reserved(hosts="aaa", worker_load="measured") == bytes_of_node


def test_pixels_that_threads_read_at_a_time():
    """The pixels being read are limited by the size of a thread's task.

    A task has about a megabyte, at least a block, and at most the thread's part of a share.
    """
    big = {"batch_size": 4096, "count": 4096}  # one mini-batch
    assert reserved(**big) == 2 * 22 * 16 * PIXELS
    assert reserved(**big, workers=3) == 3 * 2 * 22 * 16 * PIXELS
    assert reserved(**big, workers=3, prefetch=0) == reserved(**big)
    assert reserved(workers=3) == 2 * BATCH + 2 * 3 * 2 * 16 * PIXELS
    assert reserved(workers=9) == 2 * BATCH + 2 * 2 * 64 * PIXELS


def test_validation_reads_ahead_too():
    validation = 2 * 128 * 4 * (PIXELS + 1) + 2 * 128 * PIXELS
    assert reserved(validation=Drawn(1000)) == reserved() + validation
    # At the end of an epoch, the training queue has released its mini-batches.
    assert reserved(validation=Drawn(1000), validation_frequency=0) == validation
    assert reserved(validation=Drawn(20), validation_frequency=0) == reserved()
    assert reserved(validation=Drawn(20)) == reserved() + 2 * 32 * PIXELS


def peak_memory(world, monkeypatch, **options):
    """Train. Return the peak bytes of all ranks' mini-batches, and the bytes of cached images."""
    opened, peaks, caches = [], [0], []

    class Arena(arenas.Arena):
        def __init__(self):
            super().__init__()
            opened.append(self)

        def take(self, size):
            address = super().take(size)
            peaks.append(sum(arena.used() for arena in opened))
            return address

        def used(self):
            with self.lock:
                unused = (*self.free, *self.returned.copy())
                return self.bytes - sum(size for _, size in unused)

    class Cache(NodeCache):
        def __init__(self, *args):
            super().__init__(*args)
            tables = [t for t in self.tables if self.capacity]
            caches.append(sum(t.cache.nbytes + t.filled.nbytes for t in tables))

    monkeypatch.setattr(queue, "arenas", SimpleNamespace(Arena=Arena, empty=arenas.empty))
    monkeypatch.setattr(run, "NodeCache", Cache)
    net = dl.Network([dl.AveragePool2D(16), dl.Dense(2)], SHAPE)
    options = {"batch_size": 64, "epochs": 1, "plots": "none", "verbose": "off", **options}
    dl.train(net, Drawn(900), dl.TrainingOptions(**options), world=world)
    (cached,) = caches
    return int(world.gop("sum", max(peaks))), cached


LANES = 64 * 4 * PIXELS  # pixel bytes of a mini-batch; labels are too small for an arena


@pytest.mark.slow_on_ranks
@pytest.mark.parametrize("prefetch, workers", [(2, 1), (2, 3), (1, 1), (0, 1)])
def test_training_stays_within_the_budget(world, monkeypatch, prefetch, workers):
    peak, cached = peak_memory(world, monkeypatch, cache_mb=3, prefetch=prefetch, workers=workers)
    assert peak <= (1 + prefetch) * LANES  # the current mini-batch and the prefetched ones
    cache_room = 3 * 10**6 - prefetch * BATCH - 2 * READ
    assert 0.95 * cache_room < cached <= cache_room + READ
    assert peak - LANES + cached + READ <= 3 * 10**6


def test_training_with_validation_stays_within_the_budget(world, monkeypatch):
    options = {"cache_mb": 8, "validation": Drawn(600), "validation_frequency": 5}
    peak, cached = peak_memory(world, monkeypatch, **options)
    assert LANES < peak <= (2 + 2 * 3) * LANES  # a mini-batch of validation is twice as large
    assert cached and peak - 2 * LANES + cached + 3 * READ <= 8 * 10**6


def test_negative_control_the_whole_budget_for_images(world, monkeypatch):
    monkeypatch.setattr(
        memory_budget, "for_images", lambda options, *_: options.cache_mb * memory_budget.MB
    )
    peak, cached = peak_memory(world, monkeypatch, cache_mb=2)
    assert cached > 1.9e6 and (world.size > 4 or peak - LANES + cached + READ > 2.5e6)
