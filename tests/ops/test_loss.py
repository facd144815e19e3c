"""Test losses and the count of correct predictions."""

import numpy as np
import pytest
from op_references import Case, OpChecks, by_pixel, softmax_reference, torch_functions
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl.core import tape


def cross_entropy_reference(x, labels):
    rows = zip(softmax_reference(by_pixel(x)), labels.ravel(), strict=True)
    return sum(-np.log(row[label]) for row, label in rows) / labels.size


def mean_squared_error_reference(y, target):
    return sum((a - b) ** 2 for a, b in zip(y.flat, target.flat, strict=True)) / y.size


def mean_absolute_error_reference(y, target):
    return sum(abs(a - b) for a, b in zip(y.flat, target.flat, strict=True)) / y.size


def soft_cross_entropy_reference(x, targets):
    rows = zip(softmax_reference(by_pixel(x)), by_pixel(targets), strict=True)
    return (
        -sum(t * np.log(p) for row in rows for p, t in zip(*row, strict=True))
        / by_pixel(x).shape[0]
    )


CLASS_WEIGHTS = [0.5, 1.0, 2.0, 0.0, 1.5, 0.25]


def rule_reference(weights=None, smoothing=0.0, ignored=None, gamma=0.0):
    """Return a function that computes the formula of `LabelRule` in a loop over labels."""

    def loss(x, labels):
        total = weight = 0.0
        for p, y in zip(softmax_reference(by_pixel(x)), labels.ravel(), strict=True):
            if y == ignored:
                continue
            w = np.ones(len(p)) if weights is None else np.array(weights)
            total -= (1 - smoothing) * w[y] * (1 - p[y]) ** gamma * np.log(p[y])
            total -= smoothing / len(p) * sum(w * np.log(p))
            weight += w[y]
        return total / weight if weight else 0.0

    return loss


def with_rule(scores, labels, **rule):
    """Return a case in which label 5 is replaced by 255 if the rule ignores 255."""
    ignored = 5 if "ignore_label" in rule else None

    def op(x, y):
        lanes = np.where(y.lanes == ignored, 255, y.lanes)
        return dl.softmax_cross_entropy(x, y.like(lanes), **rule)

    numbers = rule.get("class_weights"), rule.get("label_smoothing", 0.0)
    reference = rule_reference(*numbers, ignored, rule.get("focal_gamma", 0.0))
    return Case(op, reference, [scores, labels])


def cross_entropy(scores, labels):
    return Case(dl.softmax_cross_entropy, cross_entropy_reference, [scores, labels])


class TestLoss(OpChecks):
    cases = {
        "softmax_cross_entropy": cross_entropy((6,), ("labels",)),
        "softmax_cross_entropy of pixels": cross_entropy((6, 2, 9), ("labels", 2, 9)),
        "softmax_cross_entropy, dimensions of 1": cross_entropy((6, 1, 3), ("labels", 3)),
        "softmax_cross_entropy of targets": Case(
            dl.softmax_cross_entropy, soft_cross_entropy_reference, [(6,), (6,)]
        ),
        "softmax_cross_entropy of targets of pixels": Case(
            dl.softmax_cross_entropy, soft_cross_entropy_reference, [(4, 2, 3), (4, 2, 3)]
        ),
        "mean_squared_error": Case(
            dl.mean_squared_error, mean_squared_error_reference, [(2, 3), (2, 3)]
        ),
        "mean_squared_error of numbers": Case(
            dl.mean_squared_error, mean_squared_error_reference, [(1,), ()]
        ),
        "mean_absolute_error": Case(
            dl.mean_absolute_error, mean_absolute_error_reference, [(1, 2, 3), (2, 3)]
        ),
    }
    errors = [
        (lambda x, f, i: dl.softmax_cross_entropy(x, f), TypeError, "expected integer labels"),
        (
            lambda x, f, i: dl.softmax_cross_entropy(x, i),
            ValueError,
            r"expected labels of shape \(\d+, 4, 4\), one for each pixel of scores .*, 2, 4, 4\)",
        ),
        (lambda x, f, i: dl.softmax_cross_entropy(i, i), ValueError, r"scores \(N, K\) or"),
        (
            lambda x, f, i: dl.softmax_cross_entropy(f, i, class_weights=[1, 2]),
            ValueError,
            "class_weights: expected 3 numbers >= 0",
        ),
        (
            lambda x, f, i: dl.softmax_cross_entropy(f, i, label_smoothing=1),
            ValueError,
            "label_smoothing must be",
        ),
        (
            lambda x, f, i: dl.softmax_cross_entropy(f, i, focal_gamma=-1),
            ValueError,
            "focal_gamma must be",
        ),
        (
            lambda x, f, i: dl.softmax_cross_entropy(f, i, focal_gamma=1, label_smoothing=0.1),
            ValueError,
            "takes no label_smoothing",
        ),
        (
            lambda x, f, i: dl.softmax_cross_entropy(f, i, ignore_label=2),
            ValueError,
            r"ignore_label must be outside 0\.\.2",
        ),
        (
            lambda x, f, i: dl.softmax_cross_entropy(f, f, focal_gamma=2),
            ValueError,
            "expected integer labels with",
        ),
        (lambda x, f, i: dl.mean_squared_error(f, i), ValueError, "target of shape"),
        (lambda x, f, i: dl.mean_squared_error(f, f.lanes), TypeError, "target: .* ndarray; "),
        (lambda x, f, i: dl.mean_absolute_error(x, f), ValueError, "target of shape"),
        (
            lambda x, f, i: dl.mean_squared_error(i, i),
            TypeError,
            "floating-point target, got int64",
        ),
    ]


class TestLabelRules(OpChecks):
    test_a_share_without_blocks = None  # not run: the weight of the labels requires all ranks
    test_errors_say_what_was_expected = None  # not run: TestLoss tests the errors
    cases = {
        "softmax_cross_entropy, class weights": with_rule(
            (6,), ("labels",), class_weights=CLASS_WEIGHTS, ignore_label=255
        ),
        "softmax_cross_entropy, label smoothing": with_rule(
            (6, 2, 3), ("labels", 2, 3), class_weights=CLASS_WEIGHTS, label_smoothing=0.2
        ),
        "softmax_cross_entropy, ignored pixels": with_rule(
            (6, 2, 3), ("labels", 2, 3), ignore_label=255, label_smoothing=0.1
        ),
        "softmax_cross_entropy, focal": with_rule(
            (6,), ("labels",), focal_gamma=2.0, class_weights=CLASS_WEIGHTS
        ),
    }


def test_softmax_and_cross_entropy_of_large_scores(world):
    x, labels = np.zeros((20, 3)), np.arange(20) % 3
    x[:, 0], x[:, 1] = 1000, -1000
    scores, labels = blocked(world, x.astype("f4"), labels)
    assert all_images(world, dl.softmax(scores))[0].tolist() == [1, 0, 0]
    loss = world.gplus(dl.softmax_cross_entropy(scores, labels))
    assert loss == pytest.approx((7 * 0 + 7 * 2000 + 6 * 1000) / 20)


def test_correct_count(world):
    x = np.array([[1, 2, 0], [3, 1, 3], [0, 0, 0], [0, 0, 5]] * 5, "f4")
    labels = np.array([1, 2, 0, 2] * 5)  # correct, wrong (classes 0 and 2 tie), correct, correct
    assert world.gplus(dl.correct_count(*blocked(world, x, labels))) == 15
    pixels = np.moveaxis(x.reshape(5, 2, 2, 3), -1, 1)  # labels of 5 images of 2x2 pixels
    count = dl.correct_count(*blocked(world, pixels, labels.reshape(5, 2, 2)))
    assert world.gplus(count) == 15
    targets = np.eye(3, dtype="f4")[labels]
    assert world.gplus(dl.correct_count(*blocked(world, x, targets))) == 15


def test_losses_and_gradients_against_pytorch(world):
    torch, functional = torch_functions()
    scores, labels = numbers("scores", 21, 5, 3, 4), np.arange(21 * 12).reshape(21, 3, 4) * 7 % 5
    y, target = numbers("y", 21, 2, 3, 4), numbers("target", 21, 2, 3, 4)
    for op, torch_op, x, target_array in (
        (dl.softmax_cross_entropy, functional.cross_entropy, scores, labels),
        (dl.softmax_cross_entropy, functional.cross_entropy, scores[:, :, 0, 0], labels[:, 0, 0]),
        (dl.softmax_cross_entropy, functional.cross_entropy, scores, abs(scores[:, ::-1])),
        (dl.mean_squared_error, functional.mse_loss, y, target),
        (dl.mean_absolute_error, functional.l1_loss, y, target),
    ):
        tensor = torch.tensor(x, requires_grad=True)
        expected = torch_op(tensor, torch.tensor(target_array))
        expected.backward()
        expected_dx = tensor.grad.numpy()
        for dtype, tolerance in (np.float64, 1e-13), (np.float32, 2e-6):
            is_label = target_array.dtype.kind == "i"
            cast = target_array if is_label else target_array.astype(dtype)
            var = dl.Var(blocked(world, x.astype(dtype)), name="x")
            loss = op(var, blocked(world, cast, batch=var.value.batch))
            assert abs(world.gplus(loss.value) - expected.item()) <= tolerance
            (dx,) = tape.backward(loss, np.ones(()), fold=world.gplus).values()
            error = abs(all_images(world, dx) - expected_dx).max()
            assert error <= tolerance * abs(expected_dx).max()


@pytest.mark.parametrize("label", [3, -1])
def test_labels_beyond_the_classes_are_refused(world, label):
    batch = dl.share(16 * world.size, world)
    pixels = np.ones((16, 2, 5), np.int32)
    pixels[3, 1, 4] = label
    for op, shape, labels in (
        (dl.softmax_cross_entropy, (16, 3), np.full(16, label)),
        (dl.softmax_cross_entropy, (16, 3, 2, 5), pixels),
        (dl.correct_count, (16, 3, 2, 5), pixels),
    ):
        with pytest.raises(ValueError, match=r"labels in 0\.\.2, .* got "):
            op(dl.from_images(np.zeros(shape, "f4"), batch), dl.from_images(labels, batch))


def test_rules_against_pytorch(world):
    """Compare class weights, smoothing and ignored pixels with PyTorch, in float64 and float32."""
    torch, functional = torch_functions()
    scores, labels = numbers("scores", 21, 6, 3, 4), np.arange(21 * 12).reshape(21, 3, 4) * 7 % 6
    labels[labels == 5] = 255
    for weights in (None, CLASS_WEIGHTS):
        tensor = torch.tensor(scores, requires_grad=True)
        weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
        expected = functional.cross_entropy(
            tensor, torch.tensor(labels), weight, ignore_index=255, label_smoothing=0.1
        )
        expected.backward()
        for dtype, tolerance in (np.float64, 1e-13), (np.float32, 2e-6):
            var = dl.Var(blocked(world, scores.astype(dtype)), name="x")
            targets = blocked(world, labels, batch=var.value.batch)
            loss = dl.softmax_cross_entropy(
                var, targets, class_weights=weights, label_smoothing=0.1, ignore_label=255
            )
            assert abs(world.gplus(loss.value) - expected.item()) <= tolerance
            (dx,) = tape.backward(loss, np.ones(()), fold=world.gplus).values()
            error = abs(all_images(world, dx) - tensor.grad.numpy()).max()
            assert error <= tolerance * abs(tensor.grad.numpy()).max()


def test_labels_that_are_all_ignored_give_0(world):
    scores, labels = blocked(world, numbers("scores", 20, 3, dtype=np.float32), np.full(20, -100))
    var = dl.Var(scores, name="x")
    loss = dl.softmax_cross_entropy(var, labels, ignore_label=-100)
    assert world.gplus(loss.value) == 0
    (dx,) = tape.backward(loss, np.ones(()), fold=world.gplus).values()
    assert not dx.lanes.any()
    assert world.gplus(dl.correct_count(scores, labels, ignore_label=-100)) == 0
    assert world.gplus(dl.label_count(scores, labels, ignore_label=-100)) == 0
    assert world.gplus(dl.label_count(*blocked(world, np.ones((20, 3)), np.arange(20) % 3))) == 20
