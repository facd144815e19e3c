"""Test blocks: shares of a mini-batch, lanes, and values with an entry per image."""

from types import SimpleNamespace

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.backends.reference import bf16
from mpidl.core import blocks, keyed
from mpidl.core.blocks import LANES
from mpidl.core.values import BF16, as_type


def ranks(size):
    return [SimpleNamespace(rank=rank, size=size) for rank in range(size)]


@pytest.mark.parametrize("count", [1, 5, 15, 16, 17, 31, 32, 100, 203])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16])
def test_shares_hold_every_image_once_and_in_order(count, size):
    samples = keyed.permutation(1000, 0, "samples")[:count]
    batches = [dl.share(count, world, indices=samples, epoch=3, seed=8) for world in ranks(size)]
    assert np.array_equal(np.concatenate([b.indices for b in batches]), samples)
    assert sum(b.blocks for b in batches) == -(-count // 16)
    filled = np.concatenate([b.counts() for b in batches])
    assert filled.sum() == count and filled.dtype == np.int32
    assert (filled[:-1] == LANES).all() and filled[-1] == (count - 1) % LANES + 1
    edge = 0
    for b in batches:
        first, last = b.images
        assert (first, last - first) == (edge, len(b.indices)) and b.counts().sum() == last - first
        assert [b.valid(i) for i in range(b.blocks)] == b.counts().tolist()
        assert (b.epoch, b.seed, b.count) == (3, 8, count)
        edge = last
    assert max(b.blocks for b in batches) - min(b.blocks for b in batches) <= 1


def test_a_rank_without_work():
    batches = [dl.share(40, world, load=(1, 0, 2)) for world in ranks(3)]
    assert [b.blocks for b in batches] == [1, 0, 2]
    assert [b.images for b in batches] == [(0, 16), (16, 16), (16, 40)]
    x = dl.from_images(np.empty((0, 3, 2)), batches[1])
    assert x.shape == (40, 3, 2) and x.lanes.shape == (0, 3, 2, 16)
    assert x.local().shape == (0, 3, 2)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 37, 64])
def test_lanes_are_sixteen_images(world, count):
    images = keyed.uniform(0, "images", count * 30).reshape(count, 3, 2, 5)
    batch = dl.share(count, world)
    first, last = batch.images
    x = dl.from_images(images[first:last], batch)
    assert x.lanes.shape == (batch.blocks, 3, 2, 5, LANES)
    assert x.shape == (count, 3, 2, 5) and x.image_shape == (3, 2, 5)  # the same on every rank
    assert np.array_equal(x.local(), images[first:last])
    for b in range(batch.blocks):
        start = first + 16 * b
        for lane in range(LANES):
            image = images[start + lane] if start + lane < count else np.zeros((3, 2, 5))
            assert np.array_equal(x.lanes[b, ..., lane], image)
        block = x.block(b)
        assert np.array_equal(block, images[start : start + 16]) and block.flags.c_contiguous
    assert np.array_equal(x.like(2 * x.lanes).local(), 2 * images[first:last])


def test_from_images_converts_and_counts(world):
    batch = dl.share(20, world)
    n = batch.images[1] - batch.images[0]
    assert dl.from_images(np.ones((n, 2), np.uint8), batch, np.float32).dtype == np.float32
    with pytest.raises(ValueError, match=f"expected this share's {n} images, got {n + 1}"):
        dl.from_images(np.ones((n + 1, 2)), batch)
    with pytest.raises(ValueError, match="lanes for this share"):
        dl.Blocked(np.zeros((batch.blocks + 1, 2, 16)), batch)


def test_values_in_bfloat16_are_read_as_float32(world):
    batch = dl.share(37, world)
    images = numbers("narrow", 37, 2, 3)[slice(*batch.images)]
    wide = dl.from_images(images, batch, np.float32)
    narrow = wide.like(as_type(wide.lanes, BF16))
    assert (narrow.storage, narrow.dtype) == (BF16, np.float32) and narrow.shape == (37, 2, 3)
    assert narrow.lanes.dtype == narrow.local().dtype == np.float32
    assert all(narrow.block(b).dtype == np.float32 for b in range(batch.blocks))
    np.testing.assert_allclose(narrow.local(), wide.local(), rtol=2**-8)
    assert narrow.local().tobytes() == bf16.rounded(wide.local()).tobytes()
    assert np.array_equal(narrow.stored().raw.view(np.uint16), narrow.raw.view(np.uint16))


def test_zero_unused_touches_the_unused_lanes_alone(world):
    for count in (1, 16, 21, 50):
        batch = dl.share(count, world)
        lanes = blocks.zero_unused(np.ones((batch.blocks, 3, LANES)), batch)
        assert np.array_equal(lanes.sum(axis=(1, 2)), 3 * batch.counts())
        assert (dl.Blocked(lanes, batch).local() == 1).all()


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.mean(),
        lambda x: x.sum(axis=0),
        lambda x: len(x),
        lambda x: float(x),
        lambda x: bool(x),
        lambda x: np.asarray(x),
        lambda x: list(x),
    ],
)
def test_operations_that_see_only_one_share_are_refused(world, use):
    batch = dl.share(20, world)
    x = dl.from_images(np.ones((batch.images[1] - batch.images[0], 2)), batch)
    with pytest.raises(TypeError, match=r"dl\.mean"):
        use(x)


def test_a_world_of_plain_sums_makes_plain_shares():
    world = SimpleNamespace(rank=0, size=2, plain=True)
    assert dl.share(40, world).tree.plain
    assert not dl.share(40, world, plain=False).tree.plain
    assert not dl.share(40, ranks(2)[0]).tree.plain
