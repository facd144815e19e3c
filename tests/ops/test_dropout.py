"""Test dropout, whose mask depends on the sample, epoch, layer and seed."""

import numpy as np
import pytest
from op_references import IDLE_RANK, assert_zero_unused
from single_rank import SingleRank, all_images, blocked, numbers

import mpidl as dl
from mpidl.core import tape


def dropped(world, x, probability=0.5, key="dropout", **batch):
    value = blocked(world, x, batch=dl.share(len(x), world, **batch))
    return all_images(world, dl.dropout(value, probability, key=key))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
def test_dropout_keeps_the_expectation(world, probability, dtype):
    x = np.ones((50, 8, 9, 7), dtype)
    y = dropped(world, x, probability, epoch=2, seed=3)
    threshold = round(probability * 65536)
    assert np.array_equal(np.unique(y[y != 0]), [np.dtype(dtype).type(65536 / (65536 - threshold))])
    deviation = np.sqrt(max(probability * (1 - probability), 1e-9) / y.size)
    assert abs((y == 0).mean() - probability) < 5 * deviation + 1e-5


def test_the_mask_belongs_to_the_sample(world):
    """A sample's mask is the same in every mini-batch, but depends on epoch, layer and seed."""
    x = numbers("x", 40, 5, 3, 3, dtype=np.float32)
    first = dropped(world, x, epoch=1, seed=1)
    order = np.argsort(numbers("order", 40))
    reordered = dropped(world, x[order], indices=order, epoch=1, seed=1)
    assert np.array_equal(reordered, first[order])
    part = dropped(world, x[7:12], indices=np.arange(7, 12), epoch=1, seed=1)
    assert np.array_equal(part, first[7:12])
    for y in (
        dropped(world, x, epoch=2, seed=1),
        dropped(world, x, epoch=1, seed=2),
        dropped(world, x, key="another", epoch=1, seed=1),
        dropped(world, x, indices=np.arange(40) + 40, epoch=1, seed=1),
        dropped(world, x, indices=np.arange(40) + (1 << 32), epoch=1, seed=1),
    ):
        assert 0.4 < ((y != 0) == (first != 0)).mean() < 0.6


@pytest.mark.parametrize("count", [5, 37])
def test_the_gradient_of_dropout(world, count):
    value = blocked(world, numbers("x", count, 3, 5))
    assert dl.check_vjp(lambda v: dl.dropout(v, 0.3), value) < 1e-8
    leaf = dl.Var(value)
    y = dl.dropout(leaf, 0.3)
    result = all_images(world, y.value)
    dx = tape.backward(y, value)[leaf]
    assert_zero_unused(dx)
    assert np.array_equal(all_images(world, dx), result)  # because the same mask is applied to dy


@pytest.mark.parametrize("count", [5, 37])
def test_dropout_is_the_same_on_any_number_of_ranks(world, count):
    x = numbers("x", count, 3, 5, dtype=np.float32)
    result, expected = (dropped(ranks, x, epoch=3) for ranks in (world, SingleRank()))
    assert result.tobytes() == expected.tobytes()


def test_dropout_of_a_share_without_blocks():
    y = dl.dropout(dl.from_images(np.zeros((0, 3, 2), np.float32), dl.share(5, IDLE_RANK)))
    assert y.shape == (5, 3, 2)


def test_the_probability_is_checked(world):
    with pytest.raises(ValueError, match="dropout: probability must be"):
        dl.dropout(blocked(world, np.zeros((20, 2, 3, 3))), 1.5)


def droppings(world, count=4000, probability=0.2, **batch):
    """Return which images stochastic depth drops, and the factors of the others."""
    x = np.ones((count, 3, 2, 2), np.float32)
    value = blocked(world, x, batch=dl.share(count, world, **batch))
    y = all_images(world, dl.dropout(value, probability, key="depth", whole_images=True))
    of_images = y.reshape(count, -1)
    assert (of_images == of_images[:, :1]).all()
    return of_images[:, 0] == 0, of_images[of_images[:, 0] != 0, 0]


@pytest.mark.parametrize("probability", [0.05, 0.2, 0.7])
def test_stochastic_depth_keeps_the_expectation(world, probability):
    dropped, factors = droppings(world, probability=probability, epoch=2, seed=3)
    deviation = np.sqrt(probability * (1 - probability) / len(dropped))
    assert abs(dropped.mean() - probability) < 5 * deviation
    threshold = round(probability * 65536)
    assert np.array_equal(np.unique(factors), [np.float32(65536 / (65536 - threshold))])
    assert abs(factors.sum() / len(dropped) - 1) < 5 * deviation / (1 - probability)


def test_stochastic_depth_depends_on_epoch_seed_and_sample_alone(world):
    first, _ = droppings(world, 300, 0.5, epoch=1, seed=1)
    single, _ = droppings(SingleRank(), 300, 0.5, epoch=1, seed=1)
    assert np.array_equal(first, single)
    order = np.argsort(numbers("order", 300))
    reordered, _ = droppings(world, 300, 0.5, indices=order, epoch=1, seed=1)
    assert np.array_equal(reordered, first[order])
    other_keys = [{"epoch": 2, "seed": 1}, {"epoch": 1, "seed": 2}]
    other_keys += [{"epoch": 1, "seed": 1, "indices": np.arange(300) + 300}]
    for keys in other_keys:
        other, _ = droppings(world, 300, 0.5, **keys)
        assert 0.35 < (other == first).mean() < 0.65


def test_neighbouring_images_are_dropped_independently(world):
    """Negative control: one random number per block would make the pairs agree."""
    dropped, _ = droppings(world, probability=0.5)
    agreement = (dropped[1:] == dropped[:-1]).mean()
    assert abs(agreement - 0.5) < 5 * 0.5 / np.sqrt(len(dropped))
    of_blocks = np.repeat(dropped[::16], 16)
    assert (of_blocks[1:] == of_blocks[:-1]).mean() > 0.9


def test_the_gradient_of_stochastic_depth(world):
    value = blocked(world, numbers("x", 37, 3, 5))
    assert dl.check_vjp(lambda v: dl.dropout(v, 0.3, whole_images=True), value) < 1e-8
    leaf = dl.Var(value)
    y = dl.dropout(leaf, 0.3, whole_images=True)
    result = all_images(world, y.value)
    dx = tape.backward(y, value)[leaf]
    assert_zero_unused(dx)
    assert np.array_equal(all_images(world, dx), result)
