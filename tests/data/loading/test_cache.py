"""Test the node's cache of decoded images."""

import os

import numpy as np
import pytest
from image_sets import grow, on_ranks, pixels_of, refusal, write_idx

from mpidl.data import ArrayDatastore, ImageFolder, NodeCache, idx_folder


def test_cache_does_not_touch_the_files_again(tmp_path):
    grow(tmp_path)
    store = ImageFolder(tmp_path)
    cache = NodeCache(store, budget_bytes=1000)
    assert cache.capacity == len(cache) == 9
    images = cache.read([7, 2, 7])
    assert np.array_equal(images, store.read([7, 2, 7]))
    os.unlink(tmp_path / store.files[7])
    os.unlink(tmp_path / store.files[2])
    assert np.array_equal(cache.read([2, 7, 7]), images[[1, 0, 0]])
    assert np.array_equal(cache.read([1, 7]), np.stack([store.read([1])[0], images[0]]))
    assert cache.name(7) == store.name(7) and cache.fingerprint() == store.fingerprint()
    assert cache.describe() == store.describe() and cache.read([]).shape == (0, 1, 6, 5)
    part, _ = cache.split(0.5)
    assert len(part) == 6 and np.array_equal(part.read([0]), cache.read(part.indices[:1]))


def test_cache_stores_as_many_images_as_its_budget_allows(tmp_path):
    grow(tmp_path)
    store = ImageFolder(tmp_path)
    cache = NodeCache(store, budget_bytes=4 * 31 + 30)  # 30 pixels and a flag each
    assert cache.capacity == 4
    images = cache.read(np.arange(9))
    assert np.array_equal(images, store.read(np.arange(9)))
    for i in (3, 4):
        os.unlink(tmp_path / store.files[i])
    assert np.array_equal(cache.read([8, 3]), images[[8, 3]])
    assert "the file no longer exists" in refusal(cache.read, [3, 4])
    assert NodeCache(store, budget_bytes=0).capacity == 0
    assert np.array_equal(NodeCache(store, budget_bytes=0).read([1]), images[[1]])
    assert NodeCache(ArrayDatastore(pixels_of(0, 4, 2, 2))).capacity == 0


def test_cache_refuses_negative_indices(tmp_path):
    """A negative index is an error; it must not mean image 0 or the last image."""
    grow(tmp_path)
    cache = NodeCache(ImageFolder(tmp_path), budget_bytes=4 * 31)
    for indices in ([-1], [2, -1]):
        for _ in range(2):  # first with an empty cache, then with a full cache
            with pytest.raises(IndexError, match="expected indices from 0, got -1"):
                cache.read(indices)
            cache.read(np.arange(9))


def test_cache_is_shared_by_the_ranks_of_a_node(tmp_path):
    drawn = grow(tmp_path)
    reads = []

    def fill(world):
        store = ImageFolder(tmp_path, world)
        read = store.read
        store.read = lambda indices: reads.append((world.rank, *indices)) or read(indices)
        cache = NodeCache(store, world)
        if world.rank == 1:
            cache.read([5])
        world.broadcast(None)
        return cache.read([5])[0]

    images = on_ranks(3, fill, list("aab"))
    assert all(np.array_equal(image, drawn["dog/2.png"]) for image in images)
    assert sorted(reads) == [(1, 5), (2, 5)]


def test_cache_stores_nothing_of_a_failed_read(tmp_path):
    grow(tmp_path)
    cache = NodeCache(ImageFolder(tmp_path))
    path, elsewhere = tmp_path / "cat" / "1.png", tmp_path / "moved.png"
    path.rename(elsewhere)
    assert refusal(cache.read, [0, 1]).startswith(f"{path}: ")
    elsewhere.rename(path)
    assert np.array_equal(cache.read([0, 1]), cache.parent.read([0, 1]))
    assert cache.tables[0].filled.tolist() == [1, 1] + [0] * 7


def test_ranks_agree_on_a_set_and_share_a_cache(tmp_path, world):
    folder = world.broadcast(tmp_path)
    drawn = world.broadcast(grow(folder / "set") if world.rank == 0 else None)
    if world.rank == 0:
        write_idx(folder / "t10k-images-idx3-ubyte.gz", pixels_of(0, 5, 4, 4))
    world.barrier()
    cache = NodeCache(ImageFolder(folder / "set", world), world)
    assert np.array_equal(cache.read([4, 0]), [drawn["dog/1.png"], drawn["cat/0.png"]])
    world.barrier()
    if world.rank == 0:
        os.unlink(folder / "set" / "dog" / "1.png")
    world.barrier()
    assert np.array_equal(cache.read([4]), [drawn["dog/1.png"]])
    store = idx_folder(folder, "test", world, labelled=False)
    assert np.array_equal(store.images[:, 0], pixels_of(0, 5, 4, 4))
    text = refusal(idx_folder, folder, "train", world)
    assert text.startswith(f"{folder}: expected train-images-idx3-ubyte")
