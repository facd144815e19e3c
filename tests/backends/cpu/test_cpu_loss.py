"""Test the CPU kernels of losses: the exponential, unused lanes, ties and special values."""

import numpy as np
import pytest
from cpu_builds import needs_kernels, on_all_builds
from single_rank import SingleRank, numbers

from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.backends.cpu import builds
from mpidl.core.blocks import LANES
from mpidl.core.fold import Tree

pytestmark = needs_kernels


def scored(blocks, classes, last=LANES):
    """Return (logits, labels, counts, tree) of blocks. The last block has `last` images."""
    shape = (blocks, classes, LANES)
    logits = numbers("logits", *shape, low=-8, high=8, dtype=np.float32)
    labels = np.arange(blocks * LANES).reshape(blocks, LANES) * 7 % classes
    counts = np.full(blocks, LANES, np.int32)
    counts[-1:] = last
    return logits, labels, counts, Tree(blocks, ((0, blocks),), 0)


def max_ulps(actual, exact):
    """Return the largest error in units of the last place."""
    return np.max(np.abs(actual - exact) / np.spacing(np.abs(exact.astype(np.float64))))


def test_the_exponential_is_nearly_exact():
    """Compare with long double for all arguments that softmax uses, and for larger arguments."""
    x = np.concatenate(
        [
            np.linspace(-708, 709, 200_001),
            -np.logspace(-320, 2.8, 5001),
            np.arange(-1020, 1022) * np.log(2) / 2,  # where the remainder is largest
            [0.0, -0.0, -708.0],
        ]
    )

    def call():
        y = np.empty_like(x)
        builds.kernels().exp(x, y, x.size)
        return y

    exact = np.exp(x.astype(np.longdouble))
    for build, y in on_all_builds(call).items():
        assert max_ulps(y, exact) <= (1.2 if build == "generic" else 1), build
        assert (y[x == 0] == 1).all()


def test_the_exponential_of_infinity_and_nan():
    x, y = np.array([-np.inf, -1e300, -1000, np.nan]), np.empty(4)
    builds.kernels().exp(x, y, 4)
    assert (y[:3] > 0).all() and y[:3].max() < 1e-300 and np.isnan(y[3])


def test_unused_lanes_change_no_byte():
    """Finite numbers in unused lanes do not change results, for last blocks of every size."""
    for last in range(1, LANES + 1):
        logits, labels, counts, tree = scored(2, 4, last)
        dirty = logits.copy()
        dirty[1, :, last:] = 1e30
        results = []
        for x in (logits, dirty):
            d = cpu.cross_entropy_dlogits(x, labels, 1.0, counts)
            assert not d[1, :, last:].any() and d[1, :, :last].all()
            sums = [f(x, labels, counts, tree) for f in (cpu.cross_entropy, cpu.correct_count)]
            results.append([d.tobytes(), *(SingleRank().gplus(s).tobytes() for s in sums)])
        assert results[0] == results[1]


def test_losses_of_scores_that_are_far_apart():
    logits = np.zeros((1, 3, LANES), np.float32)
    logits[0, 0], logits[0, 1] = 1000, -1000
    labels, counts = np.arange(LANES)[None] % 3, np.array([LANES], np.int32)
    tree = Tree(1, ((0, 1),), 0)
    loss = SingleRank().gplus(cpu.cross_entropy(logits, labels, counts, tree))
    assert loss == 6 * 0 + 5 * 2000 + 5 * 1000
    d = cpu.cross_entropy_dlogits(logits, labels, 1.0, counts)
    assert d[0, :, 1].tolist() == [1, -1, 0]


def test_nan_passes():
    logits, labels, counts, tree = scored(2, 5)
    logits[1, 3, 2] = np.nan
    assert np.isnan(SingleRank().gplus(cpu.cross_entropy(logits, labels, counts, tree)))
    d = cpu.cross_entropy_dlogits(logits, labels, 1.0, counts)
    assert np.isnan(d[1, :, 2]).all() and np.isnan(d).sum() == 5
    for backend in (cpu, reference):
        assert np.isnan(SingleRank().gplus(backend.correct_count(logits, labels, counts, tree)))


def test_ties_count_for_the_first_class():
    logits = np.zeros((1, 3, LANES), np.float32)
    logits[0, 1:, 8:] = 2
    labels, counts = np.zeros((1, LANES), np.int64), np.array([LANES], np.int32)
    labels[0, 8:] = 1
    tree = Tree(1, ((0, 1),), 0)
    assert SingleRank().gplus(cpu.correct_count(logits, labels, counts, tree)) == LANES
    assert SingleRank().gplus(cpu.correct_count(logits, labels + 1, counts, tree)) == 0


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (2, 33, 41)])
def test_equal_numbers_have_no_error_and_unused_lanes_do_not_count(shape, power):
    """Equal numbers and unused lanes have gradient 0. test_conformance.py tests other numbers."""
    y, target = (numbers(n, 3, *shape, LANES, dtype=np.float32) for n in ("y", "target"))
    target[..., 1] = y[..., 1]
    _, _, counts, tree = scored(3, 2, last=5)
    exact = reference.errors_dy(y.astype("f8"), target, power, 0.37, counts)
    total = SingleRank().gplus(reference.errors(y.astype("f8"), target, power, counts, tree))
    y[-1:, ..., 5:] = 1e30

    def call():
        dy = cpu.errors_dy(y, target, power, 0.37, counts)
        return cpu.errors(y, target, power, counts, tree), dy

    for partial, dy in on_all_builds(call).values():
        assert not dy[..., 1].any() and not dy[-1, ..., 5:].any()
        np.testing.assert_allclose(dy, exact, rtol=2**-23, atol=0)
        np.testing.assert_allclose(SingleRank().gplus(partial), total, rtol=1e-13)


def test_errors_of_infinities_and_nan():
    y, target = np.zeros((1, 3, LANES), np.float32), np.zeros((1, 3, LANES), np.float32)
    y[0, 1, 2], y[0, 2, 3], y[0, 0, 4] = np.nan, np.inf, 3e38
    target[0, 0, 4] = -3e38  # the square of the difference exceeds the range of float32
    counts, tree = np.array([5], np.int32), Tree(1, ((0, 1),), 0)
    for power, slope in (1, 1), (2, np.inf):
        assert np.isnan(SingleRank().gplus(cpu.errors(y, target, power, counts, tree)))
        d = cpu.errors_dy(y, target, power, 1.0, counts)
        assert np.isnan(d[0, 1, 2]) and np.isnan(d).sum() == 1
        assert d[0, 2, 3] == slope and d[0, 0, 4] == slope
    y[0, 1, 2] = y[0, 2, 3] = 0
    assert SingleRank().gplus(cpu.errors(y, target, 2, counts, tree)) == pytest.approx(
        3.6e77, rel=1e-6
    )
