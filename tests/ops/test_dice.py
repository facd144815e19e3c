"""Test the Dice loss."""

import numpy as np
import pytest
from op_references import Case, OpChecks, softmax_reference, torch_functions
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl.autodiff import tape

WEIGHTS = [0.0, 1.0, 2.0, 1.0, 1.5, 0.25]


def dice_reference(weights=None, smooth=1.0, ignored=None, generalized=False):
    """Return a function that computes the formula of `DiceRule` with loops."""

    def loss(x, labels):
        total = 0.0
        for scores, label in zip(x, labels.reshape(len(x), -1), strict=True):
            rows, counted = scores.reshape(len(scores), -1).T, label != ignored
            single = rows.shape[1] == 1
            p = 1 / (1 + np.exp(-rows)) if single else softmax_reference(rows)
            w = np.ones(p.shape[1]) if weights is None else np.array(weights)
            overlaps, sizes = np.zeros((2, p.shape[1]))
            for k in range(p.shape[1]):
                g = (label == k + single) & counted
                overlaps[k] = sum(p[g, k])
                sizes[k] = sum(p[counted, k] ** 2) + sum(g)
                if generalized:
                    w[k] = w[k] / max(sum(g), 1) ** 2
            if generalized:
                w = w / (p.shape[1] if weights is None else sum(weights))
                overlaps, sizes, w = [w @ overlaps], [w @ sizes], [1.0]
            else:
                w = w / w.sum()
            for weight, overlap, size in zip(w, overlaps, sizes, strict=True):
                total += weight * (1 - (2 * overlap + smooth) / (size + smooth))
        return total / len(x)

    return loss


def of_pixels(shape, classes=6, **rule):
    """Return a case in which label 5 is replaced by 255 if the rule ignores 255."""
    ignored = 5 if "ignore_label" in rule else None

    def op(x, y):
        lanes = y.lanes % classes
        return dl.dice_loss(x, y.like(np.where(lanes == ignored, 255, lanes)), **rule)

    arguments = rule.get("class_weights"), rule.get("smooth", 1.0), ignored
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
        "dice_loss of one output": of_pixels((1, 3, 4), classes=2, smooth=0.1),
    }
    variants = ("dice_loss, generalized",)
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
    weights = 0.25 / g.sum((2, 3)).clamp(min=1).double() ** 2
    generalized = (2 * (weights * overlap).sum(1) + 1) / ((weights * size).sum(1) + 1)
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
