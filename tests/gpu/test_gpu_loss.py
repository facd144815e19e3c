"""Softmax and cross-entropy on the emulated GPU, against NumPy in float64."""

import numpy as np
import pytest
from alone import numbers

from mpidl.backends import reference
from mpidl.backends.gpu import array, loss, run
from mpidl.blocks import LANES
from mpidl.fold import Late, Tree, add, fold_nodes, split_blocks


def whole(blocks):
    return Tree(blocks, ((0, blocks),), 0)


class Case:
    """Logits and labels of blocks, of which `valid` images are used."""

    def __init__(self, blocks, classes, valid):
        self.logits = numbers("logits", blocks, classes, LANES, low=-8, high=8, dtype=np.float32)
        self.labels = (np.arange(blocks * LANES) * 7 % classes).astype(np.int32)
        self.labels = self.labels.reshape(blocks, LANES)
        self.counts = np.clip(valid - LANES * np.arange(blocks), 0, LANES).astype(np.int32)
        self.valid = valid

    def uploaded(self, blocks=slice(None)):
        """(logits, labels, counts) on the device; of unused images the labels are no classes."""
        first, stop, _ = blocks.indices(len(self.logits))
        valid = np.clip(self.valid - first * LANES, 0, (stop - first) * LANES)
        labels = self.labels.copy()
        labels.ravel()[self.valid :] = 1 << 30
        return (
            array.lanes(self.logits[blocks]),
            array.plain(labels[blocks]),
            run.constant(np.array([valid], np.int32)),
        )

    def sums(self, tree, blocks=slice(None)):
        logits, labels, counts = self.uploaded(blocks)
        return [f(logits, labels, counts, tree) for f in (loss.cross_entropy, loss.correct_count)]

    def everything(self):
        logits, labels, counts = self.uploaded()
        found = [loss.softmax(logits), loss.cross_entropy_dlogits(logits, labels, 0.37, counts)]
        found += [n for partial in self.sums(whole(len(self.logits))) for n in nodes(partial)]
        return [np.asarray(v) for v in found]


def nodes(partial):
    (term,) = partial.terms
    assert partial.shape == () and partial.dtype == term.dtype == np.float64
    assert all(node.shape == () for node in term.nodes)
    return list(term.nodes.matrix.numpy()[:, 0])


CASES = [(1, 1, 16), (2, 2, 17), (3, 10, 40), (1, 32, 1), (2, 33, 32), (2, 1000, 20)]


@pytest.mark.parametrize("blocks, classes, valid", CASES)
def test_against_numpy(device, blocks, classes, valid):
    case = Case(blocks, classes, valid)
    p, d, entropy, correct = case.everything()
    assert p.dtype == np.float64 and d.dtype == np.float32
    np.testing.assert_allclose(p, reference.softmax(case.logits), rtol=1e-14)
    plain = case.logits, case.labels
    exact = reference.cross_entropy_dlogits(*plain, 0.37, case.counts)
    np.testing.assert_allclose(d, exact, rtol=2**-23, atol=1e-16)
    unused = np.moveaxis(d, -1, 1).reshape(-1, classes)[valid:]
    assert not unused.any()
    tree = whole(blocks)
    for found, function in (entropy, reference.cross_entropy), (correct, reference.correct_count):
        (expected,) = function(*plain, case.counts, tree).terms[0].nodes
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("factor, late", [(1.0, 1 / 40), (0.5, 1 / 3), (-3.0, 1.0)])
def test_a_scale_that_is_known_late(device, factor, late):
    case = Case(3, 10, 40)
    logits, labels, counts = case.uploaded()
    scale = Late(lambda: late, run.constant(np.array([late]))) * factor
    found = loss.cross_entropy_dlogits(logits, labels, scale, counts).numpy()
    expected = loss.cross_entropy_dlogits(logits, labels, factor * late, counts).numpy()
    assert found.tobytes() == expected.tobytes()


def test_which_class_is_the_largest(device):
    """The first of equal ones; one that is not a number before all."""
    nan, inf = np.nan, np.inf
    rows = {
        (1, 3, 3, 2): 1,
        (5, 5, 5, 5): 0,
        (0, nan, 9, nan): 1,
        (nan, 1, 2, 3): 0,
        (-inf, -inf, -inf, -1e30): 3,
        (-inf, -inf, -inf, -inf): 0,
        (1, inf, nan, inf): 2,
        (0.0, -0.0, -1, -1): 0,
    }
    for classes in (4, 70):
        case = Case(1, classes, len(rows))
        case.logits[...] = -1e38
        for i, row in enumerate(rows):
            case.logits[0, classes - 4 :, i] = row
            if row[0] == -inf:
                case.logits[0, : classes - 4, i] = -inf
        for shift in (0, 1):  # all of them, and none
            case.labels[0, : len(rows)] = case.logits[0, :, : len(rows)].argmax(axis=0) + shift
            (found,) = nodes(case.sums(whole(1))[1])
            assert found == (0 if shift else len(rows))
        expected = [classes - 4 + i for i in rows.values()]
        expected[5] = 0
        assert (case.labels[0, : len(rows)] - 1).tolist() == expected


def test_logits_that_are_not_finite(device):
    case = Case(1, 5, 16)
    case.logits[0, 2, 3] = np.nan
    case.logits[0, :, 4] = 3e38, -3e38, 0, 1, 2
    p, d, entropy, _ = case.everything()
    assert np.isnan(p[0, :, 3]).all() and np.isnan(p).sum() == 5 == np.isnan(d).sum()
    assert np.isnan(entropy) and p[0, :, 4].tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("valid", [0, 5, 16, 21, 32])
def test_any_number_of_images_may_be_unused(device, valid):
    case = Case(2, 7, valid)
    _, d, entropy, correct = case.everything()
    images = np.moveaxis(d, -1, 1).reshape(-1, 7)
    assert not images[valid:].any() and images[:valid].any(axis=1).all()
    p = np.moveaxis(reference.softmax(case.logits), -1, 1).reshape(-1, 7)[:valid]
    labels = case.labels.ravel()[:valid]
    np.testing.assert_allclose(
        entropy, -np.log(p[np.arange(valid), labels]).sum(), rtol=1e-13, atol=0
    )
    assert correct == (p.argmax(axis=1) == labels).sum()


def test_any_schedule_gives_the_same_bytes(emulated):
    case, found = Case(2, 70, 20), []
    for order in (0, 1, 2):
        with emulated(order):
            found += [[v.tobytes() for v in case.everything()] for _ in range(2)]
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_shares_give_the_same_root(device, ranks):
    blocks = 7
    case = Case(blocks, 10, 16 * 6 + 3)
    alone = case.sums(whole(blocks))
    runs = split_blocks(blocks, ranks, (1, 0, 2)[:ranks])  # 2 ranks: one of them has nothing
    trees = [Tree(blocks, runs, rank) for rank in range(ranks)]
    shared = [case.sums(tree, slice(*tree.run)) for tree in trees]
    edges = [node for of_rank in trees[0].nodes for node in of_rank]
    for part in (0, 1):
        (root,) = nodes(alone[part])
        parts = [node for found in shared for node in nodes(found[part])]
        assert fold_nodes(trees[0], edges, parts, add).tobytes() == root.tobytes()


def test_an_empty_share(device):
    case, tree = Case(0, 10, 0), Tree(1, ((0, 1), (1, 1)), 1)
    logits, labels, counts = case.uploaded()
    assert loss.softmax(logits).shape == (0, 10, LANES)
    assert loss.cross_entropy_dlogits(logits, labels, 1, counts).shape == (0, 10, LANES)
    assert [nodes(partial) for partial in case.sums(tree)] == [[], []]


def test_logits_of_several_pixels_are_refused(device):
    with pytest.raises(ValueError, match="expected .blocks, K, 16."):
        loss.softmax(array.empty_lanes((1, 5, 2, 2, LANES)).reshape(1, 20, LANES))
    assert loss.softmax(array.empty_lanes((1, 5, 1, 1, LANES)).reshape(1, 5, LANES)).size == 80
