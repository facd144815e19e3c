"""Pooling on GPUs against NumPy, on the emulated device."""

import numpy as np
import pytest

from mpidl.backends import REFERENCE as reference
from mpidl.backends.gpu import array, batchnorm, pool
from mpidl.blocks import LANES, DeferredInput
from mpidl.fold import Tree

NONE = ((0, 0), (0, 0))

# (C, H, W), size, stride, padding
CASES = {
    "2x2": ((3, 6, 8), (2, 2), (2, 2), NONE),
    "2x2, four channels at once": ((8, 4, 6), (2, 2), (2, 2), NONE),
    "2x2, pixels left over": ((2, 5, 7), (2, 2), (2, 2), NONE),
    "2x2, gaps that padding hides": ((1, 4, 4), (2, 2), (3, 3), ((1, 0), (1, 0))),
    "3x3/2": ((4, 9, 7), (3, 3), (2, 2), NONE),
    "3x3/2, padding": ((5, 8, 6), (3, 3), (2, 2), ((1, 1), (1, 1))),
    "3x3/2, one more behind": ((4, 8, 6), (3, 3), (2, 2), ((0, 1), (0, 1))),
    "overlapping": ((4, 6, 9), (3, 4), (1, 2), ((2, 1), (0, 3))),
    "windows end before the image": ((2, 9, 8), (2, 3), (4, 5), NONE),
    "one row": ((2, 1, 9), (1, 2), (1, 3), ((0, 0), (1, 0))),
    "8x8, global": ((4, 8, 8), (8, 8), (8, 8), NONE),
    "a row of many threads": ((132, 2, 3), (2, 2), (1, 1), NONE),
    "a byte of places": ((1, 17, 16), (16, 16), (1, 1), NONE),
}
EACH = pytest.mark.parametrize("case", CASES)


def tree(blocks):
    return Tree(blocks, ((0, blocks),), 0)


def images(case, blocks):
    """Values with many equal ones."""
    x = np.random.default_rng(0).uniform(-3, 3, (blocks, *CASES[case][0], LANES))
    return np.where(x > 0, np.round(x), x).astype(np.float32)


def by_gpu(case, x):
    """[y, argmax, dx, mean, its dx] and the dy they are for."""
    _, *how = CASES[case]
    x = array.lanes(x)
    y, argmax = pool.max_pool2d(x, *how)
    assert argmax.dtype == np.uint8 and argmax.order == y.order
    dy = np.random.default_rng(1).standard_normal(y.shape, np.float32)
    on_gpu = array.lanes(dy)
    dx, none = pool.max_pool2d_dx(on_gpu, argmax, x, *how, tree(len(x)))
    mean = pool.average_pool2d(x, *how)
    dx_of_mean, nothing = pool.average_pool2d_dx(on_gpu, x, *how, tree(len(x)))
    assert none is None and nothing is None
    return [a.numpy() for a in (y, argmax, dx, mean, dx_of_mean)], dy


def by_numpy(case, x, dy):
    _, *how = CASES[case]
    y, argmax = reference.max_pool2d(x, *how)
    dx, _ = reference.max_pool2d_dx(dy, argmax, x, *how, tree(len(x)))
    dx_of_mean, _ = reference.average_pool2d_dx(dy, x, *how, tree(len(x)))
    return [y, argmax, dx, reference.average_pool2d(x, *how), dx_of_mean]


@EACH
@pytest.mark.parametrize("blocks", [0, 2])
def test_numpy_gives_the_same(device, case, blocks):
    """To the last bit, as its sums are added in the same order."""
    x = images(case, blocks)
    found, dy = by_gpu(case, x)
    for one, other in zip(found, by_numpy(case, x, dy), strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)


@EACH
def test_float64_is_near(device, case):
    x = images(case, 1)
    (y, _, dx, mean, dx_of_mean), dy = by_gpu(case, x)
    exact = by_numpy(case, x.astype(np.float64), dy.astype(np.float64))
    for one, other in zip((y, dx, mean, dx_of_mean), (exact[0], *exact[2:]), strict=True):
        assert abs(one - other).max() <= 1e-6 * abs(other).max()


@pytest.mark.parametrize("case", ["3x3/2", "overlapping", "2x2, pixels left over"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy's own sums
def test_nan_and_infinity(device, case):
    """NaN is larger than all, and is found where it is; of infinities the first is the largest."""
    x = images(case, 1)
    shape = x.shape
    x = x.reshape(-1)
    x[::7], x[3::5], x[1::11] = np.nan, -np.inf, np.inf
    x = x.reshape(shape)
    found, dy = by_gpu(case, x)
    for one, other in zip(found, by_numpy(case, x, dy), strict=True):
        assert np.array_equal(one, other, equal_nan=True)


def test_any_schedule_gives_the_same_bytes(emulated):
    case = "overlapping"
    x, found = images(case, 1), []
    for order in (0, 1, 2):
        with emulated(order):
            found += [[a.tobytes() for a in by_gpu(case, x)[0]] for _ in range(2)]
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize("case", ["2x2", "3x3/2"])
def test_an_activation_is_read_as_its_values(device, case, blocks):
    """With the sums that batch normalization asks for."""
    shape, *how = CASES[case]
    channels = np.random.default_rng(2).uniform(-1, 1, (3, shape[0])).astype(np.float32)
    source = DeferredInput(array.lanes(images(case, blocks)), *map(array.plain, channels))
    x = batchnorm.read(source)
    y, argmax = pool.max_pool2d(source, *how)
    expected, places = pool.max_pool2d(x, *how)
    assert np.array_equal(y.numpy(), expected.numpy())
    assert np.array_equal(argmax.numpy(), places.numpy())
    mean = pool.average_pool2d(source, *how).numpy()
    assert np.array_equal(mean, pool.average_pool2d(x, *how).numpy())
    dy = array.lanes(np.random.default_rng(3).standard_normal(y.shape, np.float32))
    for name, kept in ("max_pool2d_dx", (dy, argmax)), ("average_pool2d_dx", (dy,)):
        backward = getattr(pool, name)
        dx, sums = backward(*kept, source, *how, tree(blocks))
        alone, none = backward(*kept, x, *how, tree(blocks))
        assert none is None and np.array_equal(dx.numpy(), alone.numpy())
        summed = batchnorm.activation_sums(alone, source, tree(blocks))
        assert sums.shape == summed.shape == (2 * shape[0],)
        assert bytes_of(sums) == bytes_of(summed)


def bytes_of(partial):
    return partial.terms[0].nodes.matrix.numpy().tobytes()
