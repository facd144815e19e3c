"""Test the binary cross-entropy of independent labels, and the count of correct labels."""

import numpy as np
import pytest
from op_references import Case, OpChecks, torch_functions
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl import ops
from mpidl.core import tape

WEIGHTS = [0.5, 1.0, 3.0]


def binary_reference(weights=None, gamma=0.0, ignored=None):
    """Return a function that computes the formula of `BinaryRule` in a loop over targets."""

    def loss(x, targets):
        total = count = 0
        for (image, label, *pixel), t in np.ndenumerate(targets):
            if t == ignored:
                continue
            p = 1 / (1 + np.exp(-x[(image, label, *pixel)]))
            w = 1 if weights is None else weights[label]
            total -= t * w * (1 - p) ** gamma * np.log(p) + (1 - t) * p**gamma * np.log(1 - p)
            count += 1
        return total / count if count else 0.0

    return loss


def of_labels(shape, weights=None, gamma=0.0, ignored=None):
    """Return a case whose labels 0..5 are mapped to 0, 1 and, if given, the ignored label."""

    def targets(labels):
        return labels % 2 if ignored is None else np.where(labels % 3 == 2, ignored, labels % 3)

    def op(x, labels):
        options = {"positive_weights": weights, "focal_gamma": gamma, "ignore_label": ignored}
        return dl.sigmoid_cross_entropy(x, labels.like(targets(labels.lanes)), **options)

    reference = binary_reference(weights, gamma, ignored)
    return Case(op, lambda x, labels: reference(x, targets(labels)), [shape, ("labels", *shape)])


class TestBinaryLoss(OpChecks):
    cases = {
        "sigmoid_cross_entropy": of_labels((3,)),
        "sigmoid_cross_entropy, weighted and focal": of_labels((3, 2, 5), WEIGHTS, 2.0),
    }
    errors = [
        (lambda x, f, i: dl.sigmoid_cross_entropy(x, f), ValueError, "expected targets of shape"),
        (lambda x, f, i: dl.sigmoid_cross_entropy(i, i), ValueError, r"scores \(N, K\) or"),
        (
            lambda x, f, i: dl.sigmoid_cross_entropy(f, f, positive_weights=[1]),
            ValueError,
            "positive_weights: expected 3 numbers >= 0",
        ),
        (
            lambda x, f, i: dl.sigmoid_cross_entropy(f, f, focal_gamma=-1),
            ValueError,
            "focal_gamma must be",
        ),
        (
            lambda x, f, i: dl.sigmoid_cross_entropy(f, f, ignore_label=-1),
            TypeError,
            "expected integer targets with ignore_label",
        ),
        (
            lambda x, f, i: dl.sigmoid_cross_entropy(
                f, f.like(np.ones(f.lanes.shape, int)), ignore_label=1
            ),
            ValueError,
            "ignore_label must not be 0 or 1",
        ),
        (lambda x, f, i: dl.binary_correct_count(f, i), ValueError, "expected targets of shape"),
    ]


class TestIgnoredTargets(OpChecks):
    test_a_share_without_blocks = None  # not run: the number of targets requires all ranks
    test_errors_say_what_was_expected = None  # not run: TestBinaryLoss tests the errors
    cases = {"sigmoid_cross_entropy, ignored": of_labels((3, 2), WEIGHTS, 0.0, -1)}


def test_against_pytorch(world):
    """Compare weighted and focal losses with integer and float targets, in float64 and float32."""
    torch, functional = torch_functions()
    x, fractions = numbers("scores", 21, 3, 4, low=-9, high=9), numbers("targets", 21, 3, 4)
    fractions = abs(fractions) % 1
    zeros_and_ones = (fractions > 0.5).astype(np.int32)
    for targets in (fractions, zeros_and_ones):
        for weights in (None, WEIGHTS):
            for gamma in (0, 1.5):
                tensor = torch.tensor(x, requires_grad=True)
                t = torch.tensor(targets, dtype=torch.float64)
                weight = torch.tensor(weights or [1.0] * 3, dtype=torch.float64).reshape(3, 1)
                p = torch.sigmoid(tensor)
                terms = weight * t * (1 - p) ** gamma * functional.softplus(-tensor)
                expected = (terms + (1 - t) * p**gamma * functional.softplus(tensor)).mean()
                if gamma == 0:
                    plain = functional.binary_cross_entropy_with_logits(
                        tensor, t, pos_weight=weight
                    )
                    assert abs(plain - expected).item() < 1e-14
                expected.backward()
                for dtype, tolerance in (np.float64, 1e-13), (np.float32, 1e-6):
                    kind = np.int32 if targets is zeros_and_ones else dtype
                    var = dl.Var(blocked(world, x.astype(dtype)), name="x")
                    blocked_targets = blocked(world, targets.astype(kind), batch=var.value.batch)
                    options = {"positive_weights": weights, "focal_gamma": gamma}
                    loss = dl.sigmoid_cross_entropy(var, blocked_targets, **options)
                    assert abs(world.gplus(loss.value) - expected.item()) <= tolerance
                    (dx,) = tape.backward(loss, np.ones(()), fold=world.gplus).values()
                    error = abs(all_images(world, dx) - tensor.grad.numpy()).max()
                    assert error <= tolerance * abs(tensor.grad.numpy()).max()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_scores_are_exact(world, dtype):
    x = np.array([[1000, -1000], [-1000, 1000]] * 8 + [[0.0, 80.0]], dtype)
    scores, targets = blocked(world, x, np.ones(x.shape, np.int32))
    var = dl.Var(scores, name="x")
    loss = dl.sigmoid_cross_entropy(var, targets)
    expected = (16 * 1000 + np.log(2)) / 34
    assert world.gplus(loss.value) == pytest.approx(expected, rel=1e-14)
    (dx,) = tape.backward(loss, np.ones(()), fold=world.gplus).values()
    expected = np.where(x < -99, -1.0, 0.0)
    expected[-1] = -0.5, -np.exp(-80.0)
    np.testing.assert_allclose(all_images(world, dx), expected / 34, rtol=1e-6, atol=1e-37)


def test_counts(world):
    x = np.array([[1.0, -2.0, 0.0], [-1.0, 3.0, 0.5]] * 10, "f4")
    targets = np.array([[1, 0, 1], [0, 0, 7]] * 10)  # a score of 0 predicts 0
    scores, labels = blocked(world, x, targets)
    assert world.gplus(dl.binary_correct_count(scores, labels, ignore_label=7)) == 30
    assert world.gplus(ops.binary_label_count(scores, labels, ignore_label=7)) == 50
    fractions = blocked(world, (targets == 1) * 0.75, batch=scores.batch)
    assert world.gplus(dl.binary_correct_count(scores, fractions)) == 30
    if not len(scores.local()):
        return  # a rank without images has no invalid label
    with pytest.raises(ValueError, match=r"labels in 0\.\.1, .* got .*7"):
        dl.binary_correct_count(*(v for v in (scores, labels)))


def test_targets_that_are_all_ignored_give_0(world):
    scores, targets = blocked(
        world, numbers("scores", 20, 3, dtype=np.float32), -np.ones((20, 3), int)
    )
    var = dl.Var(scores, name="x")
    loss = dl.sigmoid_cross_entropy(var, targets, ignore_label=-1)
    assert world.gplus(loss.value) == 0
    (dx,) = tape.backward(loss, np.ones(()), fold=world.gplus).values()
    assert not dx.lanes.any()
