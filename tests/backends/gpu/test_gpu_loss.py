"""Test losses on the emulated GPU: deferred scales, special values, ties and memory layouts.

tests/backends/test_conformance.py compares the numbers with float64.
"""

import math

import numpy as np
import pytest
from single_rank import numbers
from support.recorded import recorded

import mpidl as dl
from mpidl.backends.gpu import array, launching, loss
from mpidl.backends.gpu.sums import Counts
from mpidl.core import tape
from mpidl.core.blocks import LANES, OneRank
from mpidl.core.fold import Late, Tree


def single_rank_tree(blocks):
    return Tree(blocks, ((0, blocks),), 0)


class Case:
    """Logits, labels and targets of several blocks, of which `valid` images are used."""

    def __init__(self, blocks, classes, valid):
        shape = blocks, classes, LANES
        self.logits = numbers("logits", *shape, low=-8, high=8, dtype=np.float32)
        self.labels = (np.arange(blocks * LANES) * 7 % classes).astype(np.int32)
        self.labels = self.labels.reshape(blocks, LANES)
        self.target = numbers("target", *shape, low=-8, high=8, dtype=np.float32)
        self.valid = valid

    def uploaded(self):
        """Return (logits, labels, counts) on the device. Labels of unused images are invalid."""
        labels = self.labels.copy()
        labels.reshape(-1)[self.valid :] = 1 << 30
        count = launching.constant(np.array([self.valid], np.int32))
        return array.lanes(self.logits), array.lanes(labels), count

    def sums(self):
        """Return the cross-entropy, the correct count, and absolute and squared errors."""
        (logits, labels, counts), tree = self.uploaded(), single_rank_tree(len(self.logits))
        partials = [
            f(logits, labels, counts, tree) for f in (loss.cross_entropy, loss.correct_count)
        ]
        target = array.lanes(self.target)
        partials += [loss.errors(logits, target, power, counts, tree) for power in (1, 2)]
        return [sum_of(partial) for partial in partials]

    def softmax(self):
        return loss.softmax(self.uploaded()[0]).numpy()

    def dlogits(self, scale=0.37):
        logits, labels, counts = self.uploaded()
        return loss.cross_entropy_dlogits(logits, labels, scale, counts).numpy()

    def errors_dy(self, power, scale=0.37):
        logits, _, counts = self.uploaded()
        return loss.errors_dy(logits, array.lanes(self.target), power, scale, counts).numpy()


def sum_of(partial):
    """Return the single node of a Partial."""
    (term,) = partial.terms
    assert partial.shape == () and partial.dtype == term.dtype == np.float64
    (node,) = term.nodes
    assert node.shape == ()
    return term.nodes.matrix.numpy()[0, 0]


@pytest.mark.parametrize(
    "gradient",
    [Case.dlogits, lambda c, scale: c.errors_dy(1, scale), lambda c, s: c.errors_dy(2, s)],
)
@pytest.mark.parametrize("factor, late", [(1.0, 1 / 40), (0.5, 1 / 3), (-3.0, 1.0), (0.5, 1 / 40)])
def test_a_late_scale_gives_the_bytes_of_its_value(device, factor, late, gradient):
    case = Case(3, 10, 40)
    scale = Late(launching.constant(np.array([late]))) * factor
    assert gradient(case, scale).tobytes() == gradient(case, factor * late).tobytes()


def test_the_first_of_equal_scores_is_the_predicted_class(device):
    """The prediction is that of NumPy's argmax. test_loss_formulas.py tests scores that are NaN."""
    inf = np.inf
    rows = {
        (1, 3, 3, 2): 1,
        (5, 5, 5, 5): 0,
        (-inf, -inf, -inf, -1e30): 3,
        (-inf, -inf, -inf, -inf): 0,
        (1, inf, 2, inf): 1,
        (0.0, -0.0, -1, -1): 0,
    }
    for classes in (4, 70):
        case = Case(1, classes, len(rows))
        case.logits[...] = -1e38
        for i, row in enumerate(rows):
            case.logits[0, classes - 4 :, i] = row
            if row[0] == -inf:
                case.logits[0, : classes - 4, i] = -inf
        for shift in (0, 1):  # all predictions are correct, then none
            case.labels[0, : len(rows)] = case.logits[0, :, : len(rows)].argmax(axis=0) + shift
            _, correct, *_ = case.sums()
            assert correct == (0 if shift else len(rows))
        expected = [classes - 4 + i for i in rows.values()]
        expected[3] = 0
        assert (case.labels[0, : len(rows)] - 1).tolist() == expected


def test_nan_logits_spoil_their_image_and_huge_ones_do_not_overflow(device):
    case = Case(1, 5, 16)
    case.logits[0, 2, 3] = np.nan
    case.logits[0, :, 4] = 3e38, -3e38, 0, 1, 2
    p, dlogits = case.softmax(), case.dlogits()
    entropy, *_ = case.sums()
    assert np.isnan(p[0, :, 3]).all() and np.isnan(p).sum() == 5 == np.isnan(dlogits).sum()
    assert np.isnan(entropy) and p[0, :, 4].tolist() == [1, 0, 0, 0, 0]


def test_scores_in_other_layouts_are_refused(device):
    flat = array.empty_lanes((1, 5, 2, 2, LANES)).reshape(1, 20, LANES)
    with pytest.raises(ValueError, match="expected .blocks, K, 16."):
        loss.softmax(flat)
    for shape in ((1, 5, 4, LANES), (1, LANES)):
        with pytest.raises(ValueError, match="expected .blocks, K, 16. or images"):
            loss.softmax(array.empty_lanes(shape))
    assert loss.softmax(array.empty_lanes((1, 5, 1, 1, LANES)).reshape(1, 5, LANES)).size == 80
    labels = array.plain(np.zeros((1, 2, 2, LANES), np.int32))  # not stored image by image
    scores = array.empty_lanes((1, 5, 2, 2, LANES))
    with pytest.raises(ValueError, match="labels stored image by image"):
        loss.correct_count(scores, labels, None, single_rank_tree(1))


# {name: (shape of an image, whether images are flattened) of y and of the target}
PAIRS = {
    "a number": (((1,), False), ((), False)),
    "images and one gray": (((1, 4, 5), False), ((4, 5), False)),
    "flattened images and numbers": (((3, 4, 5), True), ((60,), False)),
    "both flattened": (((3, 4, 5), True), ((3, 4, 5), True)),
    "channels and numbers": (((7, 1, 1), False), ((7,), False)),
    "columns and numbers": (((4, 5, 1), False), ((4, 5), False)),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_values_and_targets_can_have_different_layouts(device, pair, swapped):
    device_batch, host_batch = dl.share(21, OneRank(), device=Counts()), dl.share(21, OneRank())
    device_values, host_values = [], []
    for name, (shape, flat) in zip("yt", pair[::-1] if swapped else pair, strict=True):
        host = dl.from_images(numbers(name, 21, *shape), host_batch)
        lanes = array.lanes(host.lanes.astype(np.float32))
        if flat:
            lanes = lanes.reshape(2, math.prod(shape), LANES)
            host = host.like(host.lanes.reshape(lanes.shape))
        device_values.append(dl.Blocked(lanes, device_batch))
        host_values.append(host)
    for op in dl.mean_squared_error, dl.mean_absolute_error:
        value, gradients = value_and_gradients(op, device_values)
        (term,) = value.terms
        total = float(term.nodes.matrix.row(0)) * float(term.scale)
        value, exact = value_and_gradients(op, host_values)
        assert total == pytest.approx(float(OneRank().gplus(value)), rel=1e-6)
        for gradient, expected in zip(gradients, exact, strict=True):
            assert gradient.shape == expected.shape
            assert abs(gradient - expected).max() <= 1e-6 * abs(expected).max()


def value_and_gradients(op, values):
    variables = [dl.Var(value, name="x") for value in values]
    result = op(*variables)
    value = result.value  # the backward pass releases it
    cotangents = tape.backward(result, np.ones(()))
    return value, [np.asarray(cotangents[v].lanes) for v in variables]


def test_flattened_images_of_other_shapes_are_refused(device):
    y, target = (
        array.empty_lanes((1, *s, LANES)).reshape(1, 24, LANES) for s in ((2, 3, 4), (4, 3, 2))
    )
    tree = single_rank_tree(1)
    with pytest.raises(ValueError, match="2 channels of 12 pixels and 4 channels of 6 pixels"):
        loss.errors(y, target, 2, None, tree)
    with pytest.raises(ValueError, match="image by image"):
        loss.errors(y, array.plain(np.zeros((1, 24, LANES), np.float32)), 2, None, tree)


def test_errors_of_nan_and_infinity(device):
    case = Case(1, 3, 5)
    case.logits[...] = case.target[...] = 0
    case.logits[0, 1, 2], case.logits[0, 2, 3] = np.nan, np.inf
    assert np.isnan(case.sums()[2:]).all()
    for power, of_infinity in (1, np.float32(0.37)), (2, np.inf):
        dy = case.errors_dy(power)
        assert np.isnan(dy[0, 1, 2]) and np.isnan(dy).sum() == 1 and dy[0, 2, 3] == of_infinity
        assert dy[0, 0, 0] == 0


@pytest.mark.parametrize("kind", ["labels", "targets", "elements"])
def test_a_loss_and_its_count_are_one_launch(device, monkeypatch, kind):
    """In a recorded step, with fewer blocks of threads than leaves; eager steps launch each sum."""
    case = Case(3, 5, 40)
    logits, labels, counts = case.uploaded()
    target, tree = array.lanes(case.target), single_rank_tree(3)
    bits = array.lanes((case.target > 0).astype(np.int32))

    def step():
        if kind == "labels":
            partials = [f(logits, labels, counts, tree) for f in LABEL_SUMS]
        elif kind == "targets":
            partials = [f(logits, target, counts, tree) for f in TARGET_SUMS]
        else:
            partials = [f(logits, bits, counts, tree) for f in ELEMENT_SUMS]
        return [partial.terms[0].nodes.matrix.row(0) for partial in partials]

    eager = [root.numpy().tobytes() for root in step()]
    monkeypatch.setattr(device, "processors", 0.06)  # limits a launch to one block for each sum
    replayed, names = recorded(device, step)
    assert names == ["program_begin", f"loss_of_{kind}", "fold_double", "program_end"]
    assert [root.tobytes() for root in replayed] == eager


LABEL_SUMS = loss.cross_entropy, loss.correct_count
TARGET_SUMS = loss.soft_cross_entropy, loss.soft_correct_count
ELEMENT_SUMS = loss.binary_cross_entropy, loss.binary_correct_count
