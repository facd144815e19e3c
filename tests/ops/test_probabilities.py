"""Compare the cross-entropy of probabilities and one-hot targets with loops and PyTorch."""

import numpy as np
import pytest
from op_references import Case, OpChecks, by_pixel, softmax_reference, torch_functions
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl.core import tape


def reference(p, targets):
    """Add up -t log(p) over all images, pixels and classes, one after another."""
    pairs = zip(by_pixel(p).flat, by_pixel(targets).flat, strict=True)
    return -sum(t * np.log(q) for q, t in pairs) / len(by_pixel(p))


def of_scores(x, targets):
    """Convert random numbers of both signs to probabilities with softmax, and call the op."""
    return dl.cross_entropy(dl.softmax(x), targets)


def soft_reference(x, targets):
    rows = softmax_reference(by_pixel(x))
    return -sum((by_pixel(targets) * np.log(rows)).ravel()) / len(rows)


def label_reference(x, labels):
    rows = softmax_reference(by_pixel(x))
    return -sum(np.log(row[i]) for row, i in zip(rows, labels.ravel(), strict=True)) / len(rows)


def smoothed(x, targets):
    """Convert random numbers to target probabilities, and call the op with label smoothing."""
    return dl.softmax_cross_entropy(x, dl.softmax(targets), label_smoothing=0.2)


def smoothed_reference(x, targets):
    """Add up -q log(p), with q = 0.8 t + 0.2 / K, over all images, pixels and classes."""
    rows, soft = (softmax_reference(by_pixel(a)) for a in (x, targets))
    q = 0.8 * soft + 0.2 / soft.shape[1]
    return -sum((q * np.log(rows)).ravel()) / len(rows)


class TestCrossEntropy(OpChecks):
    """Checks of `cross_entropy`. Each case runs with the fixture `world`."""

    cases = {
        "targets": Case(of_scores, soft_reference, [(5,), (5,)]),
        "targets of pixels": Case(of_scores, soft_reference, [(4, 2, 3), (4, 2, 3)]),
        "smoothed targets": Case(smoothed, smoothed_reference, [(5,), (5,)]),
        "smoothed targets of pixels": Case(smoothed, smoothed_reference, [(4, 2, 3), (4, 2, 3)]),
        "labels": Case(of_scores, label_reference, [(6,), ("labels",)]),
        "labels of pixels": Case(of_scores, label_reference, [(6, 1, 3), ("labels", 3)]),
    }
    errors = [
        (lambda x, f, i: dl.cross_entropy(f - 1.5, f), ValueError, "softmax_cross_entropy takes"),
        (lambda x, f, i: dl.cross_entropy(f * 0 + 0.5, x), TypeError, "expected integer labels"),
        (lambda x, f, i: dl.cross_entropy(i, i), ValueError, r"expected scores \(N, K\)"),
        (lambda x, f, i: dl.cross_entropy(f.lanes, i), TypeError, "expected a value per image"),
        (lambda x, f, i: dl.one_hot(f, 3), TypeError, "one_hot: expected integer labels"),
        (lambda x, f, i: dl.one_hot(i, 0), ValueError, "classes must be an integer >= 1"),
    ]


def test_against_pytorch(world):
    torch, functional = torch_functions()
    x, labels = numbers("scores", 21, 5, 3, 4), np.arange(21 * 12).reshape(21, 3, 4) * 7 % 5
    p = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    tensor = torch.tensor(p, requires_grad=True)
    expected = functional.nll_loss(torch.log(tensor), torch.tensor(labels))
    expected.backward()
    for dtype, tolerance in (np.float64, 1e-13), (np.float32, 2e-6):
        for targets in (labels, np.moveaxis(np.eye(5, dtype=dtype)[labels], -1, 1)):
            var = dl.Var(blocked(world, p.astype(dtype)), name="p")
            loss = dl.cross_entropy(var, blocked(world, targets, batch=var.value.batch))
            assert abs(world.gplus(loss.value) - expected.item()) <= tolerance
            (dp,) = tape.backward(loss, np.ones(()), fold=world.gplus).values()
            error = abs(all_images(world, dp) - tensor.grad.numpy()).max()
            assert error <= tolerance * abs(tensor.grad.numpy()).max()


def test_probabilities_of_zero_give_finite_numbers(world):
    """The softmax of distant scores rounds to 0, but loss and gradient must stay finite."""
    x = np.zeros((20, 2), np.float32)
    x[:, 1] = 1000
    scores, labels = blocked(world, x, np.zeros(20, np.int32))
    var = dl.Var(scores, name="x")
    loss = dl.cross_entropy(dl.softmax(var), labels)
    assert world.gplus(loss.value) == pytest.approx(-np.log(np.finfo(np.float32).tiny))
    (dx,) = tape.backward(loss, np.ones(()), fold=world.gplus).values()
    assert np.isfinite(dx.lanes).all()


def test_one_hot(world):
    labels = np.arange(20) * 7 % 3
    share = dl.one_hot(blocked(world, labels), 3)
    assert share.dtype == np.float32 and share.shape == (20, 3)
    assert np.array_equal(all_images(world, share), np.eye(3)[labels])
    pixels = labels[:12].reshape(2, 3, 2)
    assert np.array_equal(dl.one_hot(pixels, 4), np.moveaxis(np.eye(4)[pixels], -1, 1))
    for invalid in ([3, 0], [-1, 0]):
        with pytest.raises(ValueError, match=r"one_hot: expected labels in 0\.\.2, got "):
            dl.one_hot(np.array(invalid), 3)
    assert dl.one_hot(np.zeros(0, int), 3).shape == (0, 3)


def test_a_step_with_one_hot_targets_is_that_of_labels(world):
    """Losses and gradients for one-hot targets and for labels agree up to rounding."""
    net = dl.Network([dl.Dense(3)], (1, 2, 2), seed=0)
    images, labels = blocked(
        world, numbers("images", 37, 1, 2, 2, dtype=np.float32), np.arange(37) % 3
    )

    def with_labels(net, images, labels):
        return dl.softmax_cross_entropy(net(images), labels)

    def with_targets(net, images, labels):
        return dl.softmax_cross_entropy(net(images), dl.one_hot(labels, 3))

    def of_probabilities(net, images, labels):
        return dl.cross_entropy(dl.softmax(net(images)), dl.one_hot(labels, 3))

    results = [
        dl.value_and_grad(f, reduce=world)(net, images, labels)
        for f in (with_labels, with_targets, of_probabilities)
    ]
    for loss, gradients, _ in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, results[0][1][name], rtol=1e-4, atol=1e-7)
