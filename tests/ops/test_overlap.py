"""Test the Dice loss and the Tversky loss."""

import numpy as np
import pytest
from op_references import Case, OpChecks, softmax_reference, torch_functions
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl.core import tape

WEIGHTS = [0.0, 1.0, 2.0, 1.0, 1.5, 0.25]


def dice_reference(weights=None, smooth=None, ignored=None, generalized=False):
    """Return a function that computes the formulas of docs/losses.md with loops."""
    smooth = (1e-8 if generalized else 1.0) if smooth is None else smooth

    def loss(x, labels):
        total = 0.0
        for scores, label in zip(x, labels.reshape(len(x), -1), strict=True):
            rows, counted = scores.reshape(len(scores), -1).T, label != ignored
            single = rows.shape[1] == 1
            p = 1 / (1 + np.exp(-rows)) if single else softmax_reference(rows)
            w = np.ones(p.shape[1]) if weights is None else np.array(weights)
            overlaps, sizes, pixels = np.zeros((3, p.shape[1]))
            for k in range(p.shape[1]):
                g = (label == k + single) & counted
                overlaps[k] = sum(p[g, k])
                sizes[k] = sum(p[counted, k] ** 2) + sum(g)
                pixels[k] = sum(g)
            if generalized:
                pixels[pixels == 0] = min(pixels[pixels > 0], default=1)
                w = w / pixels**2
                overlaps, sizes, w = [w @ overlaps], [w @ sizes], [1.0]
            else:
                w = w / w.sum()
            for weight, overlap, size in zip(w, overlaps, sizes, strict=True):
                total += weight * (1 - (2 * overlap + smooth) / (size + smooth))
        return total / len(x)

    return loss


def tversky_reference(alpha=0.3, beta=0.7, weights=None, smooth=1.0, ignored=None):
    """Return a function that computes the loss of Salehi et al. (2017) in float64 with loops."""

    def loss(x, labels):
        total = 0.0
        for scores, label in zip(x, labels.reshape(len(x), -1), strict=True):
            rows, counted = scores.reshape(len(scores), -1).T, label != ignored
            single = rows.shape[1] == 1
            p = 1 / (1 + np.exp(-rows)) if single else softmax_reference(rows)
            w = np.ones(p.shape[1]) if weights is None else np.array(weights)
            for k in range(p.shape[1]):
                g = (label == k + single) & counted
                right = sum(p[g, k])
                errors = alpha * sum(p[counted & ~g, k]) + beta * sum(1 - p[g, k])
                similarity = (right + smooth / 2) / (right + errors + smooth / 2)
                total += w[k] / w.sum() * (1 - similarity)
        return total / len(x)

    return loss


def tversky_of_pixels(shape, classes=6, **options):
    """Return a case in which label 5 is replaced by 255 if 255 is ignored."""
    ignored = 5 if "ignore_label" in options else None

    def op(x, y):
        lanes = y.lanes % classes
        return dl.tversky_loss(x, y.like(np.where(lanes == ignored, 255, lanes)), **options)

    numbers = {name: options[name] for name in ("alpha", "beta", "smooth") if name in options}
    loss = tversky_reference(**numbers, weights=options.get("class_weights"), ignored=ignored)
    return Case(op, lambda x, y: loss(x, y % classes), [shape, ("labels", *shape[1:])])


def of_pixels(shape, classes=6, **rule):
    """Return a case in which label 5 is replaced by 255 if the rule ignores 255."""
    ignored = 5 if "ignore_label" in rule else None

    def op(x, y):
        lanes = y.lanes % classes
        return dl.dice_loss(x, y.like(np.where(lanes == ignored, 255, lanes)), **rule)

    arguments = rule.get("class_weights"), rule.get("smooth"), ignored
    reference = dice_reference(*arguments, rule.get("generalized", False))
    labels = ("labels", *shape[1:])
    return Case(op, lambda x, y: reference(x, y % classes), [shape, labels])


class TestDice(OpChecks):
    cases = {
        "dice_loss": of_pixels((6, 2, 5)),
        "dice_loss, weighted, ignored": of_pixels(
            (6, 3, 3), class_weights=WEIGHTS, ignore_label=255, smooth=0.5
        ),
        "dice_loss, generalized": of_pixels((6, 3, 3), class_weights=WEIGHTS, generalized=True),
        "dice_loss, generalized, empty classes": of_pixels((6, 1, 2), generalized=True),
        "dice_loss, generalized, one output": of_pixels((1, 1, 2), classes=2, generalized=True),
        "dice_loss of one output": of_pixels((1, 3, 4), classes=2, smooth=0.1),
    }
    variants = ("dice_loss, generalized", "dice_loss, generalized, one output")
    errors = [
        (lambda x, f, i: dl.dice_loss(i, i), ValueError, r"scores \(N, K\) or"),
        (lambda x, f, i: dl.dice_loss(x, i), ValueError, "expected labels of shape"),
        (lambda x, f, i: dl.dice_loss(f, i, smooth=-1), ValueError, "smooth must be"),
        (
            lambda x, f, i: dl.dice_loss(f, i, class_weights=[1, 0]),
            ValueError,
            "class_weights: expected 3 numbers >= 0",
        ),
        (
            lambda x, f, i: dl.dice_loss(f, i, ignore_label=2),
            ValueError,
            r"ignore_label must be outside 0\.\.2",
        ),
    ]


def test_against_pytorch(world):
    """Compare the loss and its gradient with PyTorch's autograd, in float64 and float32."""
    torch, functional = torch_functions()
    x, labels = numbers("scores", 21, 4, 3, 5), np.arange(21 * 15).reshape(21, 3, 5) * 7 % 4
    tensor = torch.tensor(x, requires_grad=True)
    p = torch.softmax(tensor, 1)
    g = functional.one_hot(torch.tensor(labels), 4).movedim(-1, 1)
    overlap, size = (p * g).sum((2, 3)), (p**2 + g).sum((2, 3))
    weights = 1 / g.sum((2, 3)).double() ** 2  # each class has pixels
    generalized = (2 * (weights * overlap).sum(1) + 1e-8) / ((weights * size).sum(1) + 1e-8)
    for name, expected in {
        False: (1 - (2 * overlap + 1) / (size + 1)).mean(),
        True: (1 - generalized).mean(),
    }.items():
        tensor.grad = None
        expected.backward(retain_graph=True)
        for dtype, tolerance in (np.float64, 1e-13), (np.float32, 1e-6):
            var = dl.Var(blocked(world, x.astype(dtype)), name="x")
            loss = dl.dice_loss(
                var, blocked(world, labels, batch=var.value.batch), generalized=name
            )
            assert abs(world.gplus(loss.value) - expected.item()) <= tolerance
            (dx,) = tape.backward(loss, np.ones(()), fold=world.gplus).values()
            error = abs(all_images(world, dx) - tensor.grad.numpy()).max()
            assert error <= tolerance * abs(tensor.grad.numpy()).max()


def test_images_without_labels_give_0(world):
    """The loss is 0 if all labels are ignored, and 1 for an absent class without smoothing."""
    x = np.zeros((20, 2, 3, 3), "f4")
    scores, labels = blocked(world, x, np.full((20, 3, 3), 255))
    for options in ({"smooth": 0.0}, {"generalized": True, "smooth": 0.0}, {}):
        var = dl.Var(scores, name="x")
        loss = dl.dice_loss(var, labels, ignore_label=255, **options)
        assert world.gplus(loss.value) == 0
        (dx,) = tape.backward(loss, np.ones(()), fold=world.gplus).values()
        assert not dx.lanes.any()
    one_class = labels.like(np.ones(labels.lanes.shape, np.int32))
    loss = dl.dice_loss(scores, one_class, smooth=0.0)
    assert world.gplus(loss) == pytest.approx((1 + 1 - 2 * 4.5 / (9 / 4 + 9)) / 2)


def generalized_dice(x, labels, epsilon=1e-8):
    """Return the loss of each image and the gradient of their mean (Sudre et al., 2017)."""
    g = (labels[:, None] == np.arange(x.shape[1]).reshape(-1, 1, 1)).astype(np.float64)
    p = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    n = g.sum(axis=(2, 3), keepdims=True)
    smallest = np.where(n > 0, n, np.inf).min(axis=1, keepdims=True)
    v = 1 / np.where(n > 0, n, smallest) ** 2
    numerator = 2 * (v * p * g).sum(axis=(1, 2, 3), keepdims=True) + epsilon
    denominator = (v * (p**2 + g)).sum(axis=(1, 2, 3), keepdims=True) + epsilon
    dp = 2 * v * (numerator / denominator * p - g) / denominator / len(x)
    return 1 - (numerator / denominator).ravel(), p * (dp - (p * dp).sum(axis=1, keepdims=True))


def rare_classes(size, classes=5):
    """Return labels of two images: some classes have few pixels, and the last class has none."""
    labels = np.zeros((2, size, size), np.int64)
    labels[:, 0, : size // 2], labels[:, 1, :2], labels[:, 2, 0] = 1, 2, 3
    labels[1, :, size // 2 :] = 1
    return labels


@pytest.mark.parametrize("size", [4, 64, 256])
def test_the_generalized_loss_of_rare_classes(world, size):
    """The loss and its gradient equal the published formula for any size of images and classes."""
    labels = rare_classes(size)
    x = numbers("scores", 2, 5, size, size, low=-6, high=6)
    loss, gradient = generalized_dice(x.astype(np.float32).astype(np.float64), labels)
    for dtype in (np.float64, np.float32):
        var = dl.Var(blocked(world, x.astype(np.float32).astype(dtype)), name="x")
        value = dl.dice_loss(var, blocked(world, labels, batch=var.value.batch), generalized=True)
        assert world.gplus(value.value) == pytest.approx(loss.mean(), rel=1e-12)
        (dx,) = tape.backward(value, np.ones(()), fold=world.gplus).values()
        for actual, expected in zip(all_images(world, dx), gradient, strict=True):
            assert abs(actual - expected).max() <= 1e-6 * abs(expected).max()


def test_the_generalized_loss_tells_right_from_wrong(world):
    """The loss is near 0 if each pixel is right and near 1 if each is wrong, for large images."""
    labels = np.zeros((2, 256, 256), np.int64)
    labels[:, 100:, 100:], labels[1, 0, 0] = 1, 2
    for shift, expected in (0, 0.0), (1, 1.0):
        x = 30.0 * (np.arange(4).reshape(-1, 1, 1) == (labels[:, None] + shift) % 4)
        loss = dl.dice_loss(*blocked(world, x.astype(np.float32), labels), generalized=True)
        assert world.gplus(loss) == pytest.approx(expected, abs=1e-3)


class TestTversky(OpChecks):
    cases = {
        "tversky_loss": tversky_of_pixels((6, 2, 5)),
        "tversky_loss, weighted, ignored": tversky_of_pixels(
            (6, 3, 3), class_weights=WEIGHTS, ignore_label=255, smooth=0.5, alpha=0.9, beta=0.2
        ),
        "tversky_loss, overlap only in part": tversky_of_pixels((6, 1, 2), alpha=2, beta=0),
        "tversky_loss of one output": tversky_of_pixels((1, 3, 4), classes=2, smooth=0.1, alpha=1),
    }
    variants = ("tversky_loss", "tversky_loss of one output")
    errors = [
        (lambda x, f, i: dl.tversky_loss(i, i), ValueError, r"tversky_loss: expected .*scores"),
        (lambda x, f, i: dl.tversky_loss(f, i, smooth=-1), ValueError, "smooth must be"),
        (lambda x, f, i: dl.tversky_loss(f, i, alpha=-1), ValueError, "alpha and beta >= 0"),
        (lambda x, f, i: dl.tversky_loss(f, i, alpha=0, beta=0), ValueError, "not both 0"),
        (lambda x, f, i: dl.tversky_loss(f, i, beta=np.inf), ValueError, "got 0.3 and inf"),
    ]


def of_images(world, op, x, labels, **options):
    """Return an op's loss, and its gradient for all images."""
    var = dl.Var(blocked(world, x), name="x")
    loss = op(var, blocked(world, labels, batch=var.value.batch), **options)
    value = world.gplus(loss.value)
    (dx,) = tape.backward(loss, np.ones(()), fold=world.gplus).values()
    return value, all_images(world, dx)


@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 0.7), (0.5, 0.5), (0.0, 1.5)])
@pytest.mark.parametrize("classes", [1, 4])
def test_tverskys_gradient_has_the_finite_differences(world, classes, alpha, beta):
    x = numbers("scores", 19, classes, 3, 4, low=-2, high=2)
    labels = np.arange(19 * 12).reshape(19, 3, 4) * 7 % max(classes, 2)
    loss, gradient = of_images(world, dl.tversky_loss, x, labels, alpha=alpha, beta=beta)
    reference = tversky_reference(alpha, beta)
    assert loss == pytest.approx(reference(x, labels), rel=1e-13)
    step = 1e-5 * numbers("step", *x.shape)
    difference = (reference(x + step, labels) - reference(x - step, labels)) / 2
    assert (gradient * step).sum() == pytest.approx(difference, rel=1e-8)
    loss, dx = of_images(
        world, dl.tversky_loss, x.astype(np.float32), labels, alpha=alpha, beta=beta
    )
    assert abs(dx - gradient).max() <= 2e-6 * abs(gradient).max()


@pytest.mark.parametrize("classes", [1, 4])
def test_equal_weights_of_errors_give_the_dice_loss(world, classes):
    """Where p is 0 or 1, p**2 is p, and the losses are equal; elsewhere, they differ."""
    labels = np.arange(19 * 12).reshape(19, 3, 4) * 7 % max(classes, 2)
    scores = numbers("scores", 19, classes, 3, 4)
    signs = np.sign(scores) if classes == 1 else scores == scores.max(axis=1, keepdims=True)
    options = {"class_weights": np.linspace(1, 2, classes)}
    for size, is_equal in (800.0, True), (1.0, False):
        dice = of_images(world, dl.dice_loss, size * signs, labels, **options)[0]
        halves = options | {"alpha": 0.5, "beta": 0.5}
        tversky = of_images(world, dl.tversky_loss, size * signs, labels, **halves)[0]
        unequal = options | {"alpha": 0.3, "beta": 0.7}
        other = of_images(world, dl.tversky_loss, size * signs, labels, **unequal)[0]
        assert (tversky == pytest.approx(dice, rel=1e-12)) == is_equal
        assert other != pytest.approx(dice, rel=1e-3)
