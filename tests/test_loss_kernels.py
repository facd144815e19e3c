"""The C kernels of softmax and cross-entropy against NumPy in float64, and each other."""

import numpy as np
import pytest
from alone import Alone, numbers
from compiled import everywhere, needed

from mpidl.backends import cpu, native, reference
from mpidl.blocks import LANES
from mpidl.fold import Tree

pytestmark = needed


def some(blocks, classes, last=LANES, spread=8.0):
    """(logits, labels, counts, tree) of blocks of which the last holds `last` images."""
    logits = numbers("logits", blocks, classes, LANES, low=-spread, high=spread, dtype=np.float32)
    labels = (np.arange(blocks * LANES) * 7 % classes).reshape(blocks, LANES)
    counts = np.full(blocks, LANES, np.int32)
    counts[-1:] = last
    return logits, labels, counts, Tree(blocks, ((0, blocks),), 0)


def units(found, exact):
    """The largest error in units of the last place."""
    return np.max(np.abs(found - exact) / np.spacing(np.abs(exact.astype(np.float64))))


def test_exponential():
    """Against long double, over all that softmax can ask for, and beyond."""
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
        native.kernels().exp(x, y, x.size)
        return y

    exact = np.exp(x.astype(np.longdouble))
    for build, y in everywhere(call).items():
        assert units(y, exact) <= (1.2 if build == "generic" else 1), build
        assert (y[x == 0] == 1).all()


def test_exponential_of_what_is_not_finite():
    x, y = np.array([-np.inf, -1e300, -1000, np.nan]), np.empty(4)
    native.kernels().exp(x, y, 4)
    assert (y[:3] > 0).all() and y[:3].max() < 1e-300 and np.isnan(y[3])


@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("classes", [1, 2, 10, 1000, 1025])
def test_against_numpy(blocks, classes):
    logits, labels, counts, tree = some(blocks, classes, last=5)

    def call():
        return (
            cpu.softmax(logits),
            cpu.cross_entropy(logits, labels, counts, tree),
            cpu.cross_entropy_dlogits(logits, labels, 0.37, counts),
            cpu.correct_count(logits, labels, counts, tree),
        )

    p = reference.softmax(logits)
    d = reference.cross_entropy_dlogits(logits, labels, 0.37, counts)
    sums = [
        f(logits, labels, counts, tree) for f in (reference.cross_entropy, reference.correct_count)
    ]
    for found in everywhere(call).values():
        assert [v.dtype for v in found] == [np.float64, np.float64, np.float32, np.float64]
        np.testing.assert_allclose(found[0], p, rtol=1e-14)
        assert found[2].shape == d.shape
        np.testing.assert_allclose(found[2], d, rtol=2**-23, atol=1e-16)
        for partial, expected in zip((found[1], found[3]), sums, strict=True):
            assert partial.shape == () and len(partial.terms[0].nodes) == len(tree.nodes[0])
            if blocks:
                wanted = Alone().gplus(expected)
                np.testing.assert_allclose(Alone().gplus(partial), wanted, rtol=1e-13)


def test_last_blocks_of_every_size():
    """Whatever lies in unused lanes: finite garbage there changes no byte."""
    for last in range(1, LANES + 1):
        logits, labels, counts, tree = some(2, 4, last)
        dirty = logits.copy()
        dirty[1, :, last:] = 1e30
        results = []
        for x in (logits, dirty):
            d = cpu.cross_entropy_dlogits(x, labels, 1.0, counts)
            assert not d[1, :, last:].any() and d[1, :, :last].all()
            sums = [f(x, labels, counts, tree) for f in (cpu.cross_entropy, cpu.correct_count)]
            results.append([d.tobytes(), *(Alone().gplus(s).tobytes() for s in sums)])
        assert results[0] == results[1]


def test_leaves_are_blocks():
    """A block's sum is the same whoever else holds blocks: only the tree adds them."""
    logits, labels, counts, _ = some(5, 10, last=3)
    whole = cpu.cross_entropy(logits, labels, counts, Tree(5, ((0, 5),), 0))
    nodes = []
    for rank, (start, stop) in enumerate(((0, 3), (3, 5))):
        part = slice(start, stop)
        tree = Tree(5, ((0, 3), (3, 5)), rank)
        found = cpu.cross_entropy(logits[part], labels[part], counts[part], tree)
        nodes += [float(node) for node in found.terms[0].nodes]
    a, b, c, d = nodes  # (0,2) (2,3) (3,4) (4,5)
    assert float(Alone().gplus(whole)) == (a + (b + c)) + d


def test_scores_that_are_far_apart():
    logits = np.zeros((1, 3, LANES), np.float32)
    logits[0, 0], logits[0, 1] = 1000, -1000
    labels, counts = np.arange(LANES)[None] % 3, np.array([LANES], np.int32)
    tree = Tree(1, ((0, 1),), 0)
    loss = Alone().gplus(cpu.cross_entropy(logits, labels, counts, tree))
    assert loss == 6 * 0 + 5 * 2000 + 5 * 1000
    d = cpu.cross_entropy_dlogits(logits, labels, 1.0, counts)
    assert d[0, :, 1].tolist() == [1, -1, 0]


def test_not_a_number_stays():
    logits, labels, counts, tree = some(2, 5)
    logits[1, 3, 2] = np.nan
    assert np.isnan(Alone().gplus(cpu.cross_entropy(logits, labels, counts, tree)))
    d = cpu.cross_entropy_dlogits(logits, labels, 1.0, counts)
    assert np.isnan(d[1, :, 2]).all() and np.isnan(d).sum() == 5
    labels[1, 2] = 3  # NumPy's argmax takes it for the largest
    counted = [
        float(Alone().gplus(backend.correct_count(logits, labels, counts, tree)))
        for backend in (cpu, reference)
    ]
    assert counted[0] == counted[1]


def test_ties_count_for_the_first_class():
    logits = np.zeros((1, 3, LANES), np.float32)
    logits[0, 1:, 8:] = 2
    labels, counts = np.zeros((1, LANES), np.int64), np.array([LANES], np.int32)
    labels[0, 8:] = 1
    tree = Tree(1, ((0, 1),), 0)
    assert Alone().gplus(cpu.correct_count(logits, labels, counts, tree)) == LANES
    assert Alone().gplus(cpu.correct_count(logits, labels + 1, counts, tree)) == 0
