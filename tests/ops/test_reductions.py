"""Test sums and means over the images and over other axes, and their gradients."""

import numpy as np
import pytest
from op_references import Case, OpChecks
from single_rank import all_images, blocked, numbers

import mpidl as dl


def along(op, **options):
    """Return a function that calls the op with the given options."""
    return lambda x: op(x, **options)


def plain_sum(x, axes):
    """Sum the entries of an array in order."""
    left_axes = [i for i in range(x.ndim) if i not in axes]
    total = np.zeros([x.shape[i] for i in left_axes])
    for index in np.ndindex(*x.shape):
        total[tuple(index[i] for i in left_axes)] += x[index]
    return total


def case(op, axis, shape, **options):
    axes = [i % (len(shape) + 1) for i in (axis if isinstance(axis, tuple) else (axis,))]

    def reference(x):
        total = plain_sum(x, axes)
        if options.get("keepdims"):
            total = total.reshape([1 if i in axes else n for i, n in enumerate(x.shape)])
        return total / np.prod([x.shape[i] for i in axes]) if op is dl.mean else total

    return Case(along(op, axis=axis, **options), reference, [shape])


class TestReductions(OpChecks):
    """Checks of sums and means. Each case runs with the fixture `world`."""

    cases = {
        "mean": Case(dl.mean, lambda x: x.sum(axis=0) / len(x), [(2, 3)]),
        "mean of numbers": Case(dl.mean, lambda x: x.sum() / len(x), [()]),
        "sum": Case(dl.sum, lambda x: x.sum(axis=0), [(3, 2)]),
        "sum, axis 1": case(dl.sum, 1, (5,)),
        "sum, axes 2 and 3": case(dl.sum, (2, 3), (2, 3, 2)),
        "sum, last axis": case(dl.sum, -1, (2, 4), keepdims=True),
        "sum, all axes": case(dl.sum, (0, 1, 2), (3, 2)),
        "mean, axis 1": case(dl.mean, 1, (3, 4), keepdims=True),
        "mean, axes 0, 2 and 3": case(dl.mean, (3, 0, 2), (2, 3, 2)),
    }
    errors = [
        (
            lambda x, f, i: dl.sum(x, axis=4),
            ValueError,
            r"sum: expected axes from 0 to 3 of .*, got 4",
        ),
        (lambda x, f, i: dl.mean(x, axis=(1, -3)), ValueError, "mean: expected each axis once"),
        (lambda x, f, i: dl.mean(x, axis=()), ValueError, "expected axes from 0 to 3"),
        (lambda x, f, i: dl.sum(x, axis="1"), ValueError, "expected axes from 0 to 3"),
        (lambda x, f, i: dl.sum(x, keepdims=True), ValueError, "keepdims: expected axes without 0"),
        (lambda x, f, i: dl.sum(x.lanes, axis=1), TypeError, "sum: expected a value per image"),
    ]


def test_labels_can_be_counted(world):
    """A sum of integers is exact and has an integer dtype."""
    labels = np.arange(60).reshape(20, 3)
    sums = dl.sum(blocked(world, labels), axis=1)
    assert sums.dtype.kind == "i"
    assert np.array_equal(all_images(world, sums), labels.sum(axis=1))


def test_a_normalization_of_ones_own(world):
    """A custom normalization, written with means, broadcasts as in NumPy."""

    def normalized(x):
        centred = x - dl.mean(x, axis=(1, 2), keepdims=True)
        return centred / dl.sqrt(dl.mean(centred**2, axis=(1, 2), keepdims=True) + 1e-5)

    x = numbers("x", 21, 3, 5)
    expected = x - x.mean(axis=(1, 2), keepdims=True)
    expected = expected / np.sqrt((expected**2).mean(axis=(1, 2), keepdims=True) + 1e-5)
    share = blocked(world, x)
    np.testing.assert_allclose(all_images(world, normalized(share)), expected, rtol=1e-12)
    assert dl.check_vjp(normalized, share) < 1e-7


@pytest.mark.parametrize("op", [dl.sum, dl.mean])
def test_the_result_is_in_the_type_of_the_value(world, op):
    x = blocked(world, np.ones((17, 3), np.float32))
    assert op(x, axis=1).dtype == np.float32 and op(x).dtype == np.float64
