"""Memory for data: what --cache-mb leaves for decoded images, and that training holds to it."""

from types import SimpleNamespace

import numpy as np
import pytest

import mpidl as dl
from mpidl.backends.cpu import arenas
from mpidl.data import NodeCache, queue
from mpidl.data.datastore import Datastore
from mpidl.training import memory_budget, trainer

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


class Drawn(Datastore):
    """Images that do not lie in memory."""

    image_shape, classes = SHAPE, ["a", "b"]

    def __init__(self, count, targets_shape=None):
        self.labels, self.targets_shape = np.arange(count) % 2, targets_shape

    def read(self, indices):
        return np.stack([np.full(SHAPE, i % 256, np.uint8) for i in indices])


def world_of(hosts, device=None):
    return SimpleNamespace(rank=0, size=len(hosts), hosts=list(hosts), device=device)


def left(hosts="a", count=1000, store=None, device=None, **options):
    how = {"batch_size": 64, "cache_mb": 10, **options}
    store = Drawn(count) if store is None else store
    return memory_budget.for_images(dl.TrainingOptions(**how), store, world_of(hosts, device))


def taken(**how):
    return 10 * 10**6 - left(**how)


BATCH, READ = 64 * 4 * (PIXELS + 1), 2 * 64 * PIXELS  # float32 and labels; uint8, two copies


def test_mini_batches_made_ahead_come_first():
    assert taken() == 2 * BATCH + READ
    assert taken(prefetch=5) == 5 * BATCH + READ
    assert taken(prefetch=0) == taken(count=64) == taken(count=64, workers=3) == READ
    assert taken(count=65) == BATCH + READ  # no more than there are
    assert taken(batch_size=60) == taken()  # whole blocks
    assert taken(random_crop="16x16") == 2 * 64 * 4 * (3 * 16 * 16 + 1) + READ
    pairs = Drawn(1000, targets_shape=(2, 5))
    assert taken(store=pairs) == 2 * 64 * 4 * (PIXELS + 10) + READ
    assert taken(device="a GPU") == 10 * 64 * (PIXELS + 4) + READ  # 8 of them in pinned memory
    assert left(cache_mb=2, prefetch=1) == 2 * 10**6 - BATCH - READ
    assert left(cache_mb=1) == left(cache_mb=0) == 0


def test_the_ranks_of_a_node_share_them():
    assert [taken(hosts="a" * n) for n in (2, 3, 4, 9)] == [taken()] * 4
    assert taken(hosts="abcd") == taken(hosts="ababcdcd", batch_size=128) / 2 == taken() / 4
    assert taken(hosts="aab") == 3 / 4 * taken()  # of 4 blocks the first rank has 2, the second 1
    assert taken(hosts="ab", worker_load="1,3") == 3 / 4 * taken()
    assert taken(hosts="aaa", worker_load="measured") == taken()


def test_what_threads_read_at_a_time():
    """Each a task, of a megabyte, of a block, or of its part of a share: of one mini-batch, or of
    those that are made ahead."""
    big = {"batch_size": 4096, "count": 4096}  # in one mini-batch
    assert taken(**big) == 2 * 22 * 16 * PIXELS
    assert taken(**big, workers=3) == 3 * 2 * 22 * 16 * PIXELS
    assert taken(**big, workers=3, prefetch=0) == taken(**big)
    assert taken(workers=3) == 2 * BATCH + 2 * 3 * 2 * 16 * PIXELS
    assert taken(workers=9) == 2 * BATCH + 2 * 2 * 64 * PIXELS


def test_validation_reads_ahead_too():
    more = 2 * 128 * 4 * (PIXELS + 1) + 2 * 128 * PIXELS
    assert taken(validation=Drawn(1000)) == taken() + more
    assert taken(validation=Drawn(1000), validation_frequency=0) == more  # when training's are gone
    assert taken(validation=Drawn(20), validation_frequency=0) == taken()
    assert taken(validation=Drawn(20)) == taken() + 2 * 32 * PIXELS


def training(world, monkeypatch, **options):
    """(bytes of mini-batches at their most, on all ranks together; bytes of images kept)."""
    opened, most, caches = [], [0], []

    class Arena(arenas.Arena):
        def __init__(self):
            super().__init__()
            opened.append(self)

        def take(self, size):
            address = super().take(size)
            most[0] = max(most[0], sum(arena.held() for arena in opened))
            return address

        def held(self):
            with self.lock:
                unused = (*self.free, *self.returned.copy())
                return self.bytes - sum(size for _, size in unused)

    class Cache(NodeCache):
        def __init__(self, *how):
            super().__init__(*how)
            tables = [t for t in self.tables if self.capacity]
            caches.append(sum(t.cache.nbytes + t.filled.nbytes for t in tables))

    monkeypatch.setattr(queue, "arenas", SimpleNamespace(Arena=Arena, empty=arenas.empty))
    monkeypatch.setattr(trainer, "NodeCache", Cache)
    net = dl.Network([dl.AveragePool2D(16), dl.Dense(2)], SHAPE)
    how = {"batch_size": 64, "epochs": 1, "plots": "none", "verbose": "off", **options}
    dl.train(net, Drawn(900), dl.TrainingOptions(**how), world=world)
    (kept,) = caches
    return int(world.gop("sum", most[0])), kept


LANES = 64 * 4 * PIXELS  # a mini-batch without its labels, which are too small for an arena


@pytest.mark.parametrize("prefetch, workers", [(2, 1), (2, 3), (1, 1), (0, 1)])
def test_training_holds_to_it(world, monkeypatch, prefetch, workers):
    how = {"cache_mb": 3, "prefetch": prefetch, "workers": workers}
    most, kept = training(world, monkeypatch, **how)
    assert most <= (1 + prefetch) * LANES  # one in use
    room_for_kept = 3 * 10**6 - prefetch * BATCH - 2 * READ
    assert 0.95 * room_for_kept < kept <= room_for_kept + READ
    assert most - LANES + kept + READ <= 3 * 10**6


def test_training_that_validates_holds_to_it(world, monkeypatch):
    how = {"cache_mb": 8, "validation": Drawn(600), "validation_frequency": 5}
    most, kept = training(world, monkeypatch, **how)
    assert LANES < most <= (2 + 2 * 3) * LANES  # a mini-batch of validation is twice as large
    assert kept and most - 2 * LANES + kept + 3 * READ <= 8 * 10**6


def test_negative_control_all_of_it_for_images(world, monkeypatch):
    monkeypatch.setattr(
        memory_budget, "for_images", lambda options, *_: options.cache_mb * memory_budget.MB
    )
    most, kept = training(world, monkeypatch, cache_mb=2)
    assert kept > 1.9e6 and (world.size > 4 or most - LANES + kept + READ > 2.5e6)
