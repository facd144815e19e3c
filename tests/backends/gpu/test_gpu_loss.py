"""Softmax, cross-entropy and errors on the emulated GPU, against NumPy in float64."""

import math

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.autodiff import tape
from mpidl.backends import REFERENCE as reference
from mpidl.backends.gpu import array, launching, loss
from mpidl.backends.gpu.sums import Counts
from mpidl.blocks import LANES, OneRank
from mpidl.fold import Late, Tree


def whole(blocks):
    return Tree(blocks, ((0, blocks),), 0)


class Case:
    """Logits and labels of blocks, of which `valid` images are used."""

    def __init__(self, blocks, classes, valid, pixels=()):
        shape = blocks, classes, *pixels, LANES
        self.logits = numbers("logits", *shape, low=-8, high=8, dtype=np.float32)
        self.labels = (np.arange(blocks * LANES * math.prod(pixels)) * 7 % classes).astype(np.int32)
        self.labels = self.labels.reshape(blocks, *pixels, LANES)
        self.target = numbers("target", *shape, low=-8, high=8, dtype=np.float32)
        self.counts = np.clip(valid - LANES * np.arange(blocks), 0, LANES).astype(np.int32)
        self.valid = valid

    def uploaded(self, blocks=slice(None)):
        """(logits, labels, counts) on the device; of unused images the labels are no classes."""
        first, stop, _ = blocks.indices(len(self.logits))
        valid = np.clip(self.valid - first * LANES, 0, (stop - first) * LANES)
        labels = self.labels.copy()
        for image in range(self.valid, LANES * len(labels)):
            labels[image // LANES, ..., image % LANES] = 1 << 30
        return (
            array.lanes(self.logits[blocks]),
            array.lanes(labels[blocks]),
            launching.constant(np.array([valid], np.int32)),
        )

    def sums(self, tree, blocks=slice(None)):
        logits, labels, counts = self.uploaded(blocks)
        yield from (
            f(logits, labels, counts, tree) for f in (loss.cross_entropy, loss.correct_count)
        )
        for power in (1, 2):
            yield loss.errors(logits, array.lanes(self.target[blocks]), power, counts, tree)

    def everything(self):
        logits, labels, counts = self.uploaded()
        found = [loss.softmax(logits), loss.cross_entropy_dlogits(logits, labels, 0.37, counts)]
        found += [n for partial in self.sums(whole(len(self.logits))) for n in nodes(partial)]
        target = array.lanes(self.target)
        found += [loss.errors_dy(logits, target, power, 0.37, counts) for power in (1, 2)]
        return [np.asarray(v) for v in found]


def nodes(partial):
    (term,) = partial.terms
    assert partial.shape == () and partial.dtype == term.dtype == np.float64
    assert all(node.shape == () for node in term.nodes)
    return list(term.nodes.matrix.numpy()[:, 0])


@pytest.mark.parametrize("factor, late", [(1.0, 1 / 40), (0.5, 1 / 3), (-3.0, 1.0)])
def test_a_scale_that_is_known_late(device, factor, late):
    case = Case(3, 10, 40)
    logits, labels, counts = case.uploaded()
    scale = Late(lambda: late, launching.constant(np.array([late]))) * factor
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
            _, correct, *_ = case.sums(whole(1))
            (found,) = nodes(correct)
            assert found == (0 if shift else len(rows))
        expected = [classes - 4 + i for i in rows.values()]
        expected[5] = 0
        assert (case.labels[0, : len(rows)] - 1).tolist() == expected


def test_logits_that_are_not_finite(device):
    case = Case(1, 5, 16)
    case.logits[0, 2, 3] = np.nan
    case.logits[0, :, 4] = 3e38, -3e38, 0, 1, 2
    p, d, entropy, *_ = case.everything()
    assert np.isnan(p[0, :, 3]).all() and np.isnan(p).sum() == 5 == np.isnan(d).sum()
    assert np.isnan(entropy) and p[0, :, 4].tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("valid", [0, 5, 16, 21, 32])
def test_any_number_of_images_may_be_unused(device, valid):
    case = Case(2, 7, valid)
    _, d, entropy, correct, *_ = case.everything()
    images = np.moveaxis(d, -1, 1).reshape(-1, 7)
    assert not images[valid:].any() and images[:valid].any(axis=1).all()
    p = np.moveaxis(reference.softmax(case.logits), -1, 1).reshape(-1, 7)[:valid]
    labels = case.labels.ravel()[:valid]
    np.testing.assert_allclose(
        entropy, -np.log(p[np.arange(valid), labels]).sum(), rtol=1e-13, atol=0
    )
    assert correct == (p.argmax(axis=1) == labels).sum()


def test_scores_that_lie_otherwise_are_refused(device):
    flat = array.empty_lanes((1, 5, 2, 2, LANES)).reshape(1, 20, LANES)
    with pytest.raises(ValueError, match="expected .blocks, K, 16."):
        loss.softmax(flat)
    for shape in ((1, 5, 4, LANES), (1, LANES)):
        with pytest.raises(ValueError, match="expected .blocks, K, 16. or images"):
            loss.softmax(array.empty_lanes(shape))
    assert loss.softmax(array.empty_lanes((1, 5, 1, 1, LANES)).reshape(1, 5, LANES)).size == 80
    labels = array.plain(np.zeros((1, 2, 2, LANES), np.int32))  # not image by image
    with pytest.raises(ValueError, match="labels that lie image by image"):
        loss.correct_count(array.empty_lanes((1, 5, 2, 2, LANES)), labels, None, whole(1))


# y and its target as (shape, flattened): of one image, and how they lie
PAIRS = {
    "a number": (((1,), False), ((), False)),
    "images and one gray": (((1, 4, 5), False), ((4, 5), False)),
    "images that were flattened, and numbers": (((3, 4, 5), True), ((60,), False)),
    "both flattened": (((3, 4, 5), True), ((3, 4, 5), True)),
    "channels and numbers": (((7, 1, 1), False), ((7,), False)),
    "columns and numbers": (((4, 5, 1), False), ((4, 5), False)),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_values_may_lie_otherwise_than_their_targets(device, pair, turned):
    batch = dl.share(21, OneRank(), device=Counts())
    host = dl.share(21, OneRank())
    made = []
    for name, (shape, flat) in zip("yt", pair[::-1] if turned else pair, strict=True):
        plain = dl.from_images(numbers(name, 21, *shape), host)
        lanes = array.lanes(plain.lanes.astype(np.float32))
        if flat:
            lanes = lanes.reshape(2, math.prod(shape), LANES)
            plain = plain.like(plain.lanes.reshape(lanes.shape))
        made.append((dl.Blocked(lanes, batch), plain))
    for op in dl.mean_squared_error, dl.mean_absolute_error:
        results = []
        for values in zip(*made, strict=True):
            variables = [dl.Var(value, name="x") for value in values]
            value = op(*variables)
            total = float(OneRank().gplus(value.value) if values[0].batch is host else 0)
            if values[0].batch is batch:
                (term,) = value.value.terms
                total = float(term.nodes.matrix.row(0)) * float(term.scale)
            found = tape.backward(value, np.ones(()))
            results.append((total, [np.asarray(found[v].lanes) for v in variables]))
        (total, slopes), (expected, exact) = results
        assert total == pytest.approx(expected, rel=1e-6)
        for slope, wanted in zip(slopes, exact, strict=True):
            assert slope.shape == wanted.shape
            assert abs(slope - wanted).max() <= 1e-6 * abs(wanted).max()


def test_flattened_images_of_other_shapes_are_refused(device):
    one, other = (
        array.empty_lanes((1, *s, LANES)).reshape(1, 24, LANES) for s in ((2, 3, 4), (4, 3, 2))
    )
    with pytest.raises(ValueError, match="values that lie alike"):
        loss.errors(one, other, 2, None, whole(1))
    with pytest.raises(ValueError, match="image by image"):
        loss.errors(one, array.plain(np.zeros((1, 24, LANES), np.float32)), 2, None, whole(1))


@pytest.mark.parametrize("power", [1, 2])
def test_errors_with_a_scale_that_is_known_late(device, power):
    case = Case(3, 10, 40)
    logits, _, counts = case.uploaded()
    target = array.lanes(case.target)
    scale = Late(lambda: 1 / 40, launching.constant(np.array([1 / 40]))) * 0.5
    found = loss.errors_dy(logits, target, power, scale, counts).numpy()
    assert (
        found.tobytes() == loss.errors_dy(logits, target, power, 0.5 / 40, counts).numpy().tobytes()
    )


def test_errors_that_are_not_finite(device):
    case = Case(1, 3, 5)
    case.logits[...] = case.target[...] = 0
    case.logits[0, 1, 2], case.logits[0, 2, 3] = np.nan, np.inf
    _, _, *sums, sign, slope = case.everything()
    assert np.isnan(sums[2:]).all()
    for d, infinite in (sign, np.float32(0.37)), (slope, np.inf):
        assert np.isnan(d[0, 1, 2]) and np.isnan(d).sum() == 1 and d[0, 2, 3] == infinite
        assert d[0, 0, 0] == 0
