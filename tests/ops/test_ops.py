"""Every op against a plain float64 reference written here, and its vjp along random directions."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from single_rank import SingleRank, all_images, blocked, numbers

import mpidl as dl
from mpidl.autodiff import tape
from mpidl.blocks import LANES, zero_unused

# references: float64, images first, loops where the op has sums


def conv2d_reference(x, weight, bias, stride, pads, dilation, groups):
    """Every product of the definition, one output pixel at a time."""
    (top, bottom), (left, right) = pads
    n, c, h, w = x.shape
    k, share, r, s = weight.shape
    padded = np.zeros((n, c, h + top + bottom, w + left + right))
    padded[:, :, top : top + h, left : left + w] = x
    p = (h + top + bottom - dilation[0] * (r - 1) - 1) // stride[0] + 1
    q = (w + left + right - dilation[1] * (s - 1) - 1) // stride[1] + 1
    y = np.zeros((n, k, p, q))
    for out in range(k):
        first = out // (k // groups) * share
        for i in range(p):
            for j in range(q):
                y[:, out, i, j] = bias[out]
                for channel in range(share):
                    for a in range(r):
                        for b in range(s):
                            y[:, out, i, j] += (
                                padded[
                                    :,
                                    first + channel,
                                    i * stride[0] + a * dilation[0],
                                    j * stride[1] + b * dilation[1],
                                ]
                                * weight[out, channel, a, b]
                            )
    return y


def dense_reference(x, weight, bias):
    y = np.empty((len(x), len(weight)))
    for i in range(len(x)):
        for k in range(len(weight)):
            y[i, k] = sum(x[i, f] * weight[k, f] for f in range(x.shape[1])) + bias[k]
    return y


def batchnorm_reference(x, gamma, beta, epsilon=1e-5):
    y = np.empty_like(x)
    for c in range(x.shape[1]):
        channel = x[:, c]
        mean = sum(v.sum() for v in channel) / channel.size
        variance = sum(((v - mean) ** 2).sum() for v in channel) / channel.size
        y[:, c] = gamma[c] * (channel - mean) / np.sqrt(variance + epsilon) + beta[c]
    return y


def softmax_reference(x):
    y = np.empty_like(x)
    for i, scores in enumerate(x):
        y[i] = [np.exp(s) / sum(np.exp(t) for t in scores) for s in scores]
    return y


def cross_entropy_reference(x, labels):
    return sum(-np.log(p[k]) for p, k in zip(softmax_reference(x), labels, strict=True)) / len(x)


def by_pixel(x):
    """(N, K, ...) as (N * pixels, K)."""
    return np.moveaxis(x, 1, -1).reshape(-1, x.shape[1])


def softmax_of_pixels_reference(x):
    found = softmax_reference(by_pixel(x)).reshape(len(x), *x.shape[2:], x.shape[1])
    return np.moveaxis(found, -1, 1)


def mean_squared_error_reference(y, target):
    return sum((a - b) ** 2 for a, b in zip(y.flat, target.flat, strict=True)) / y.size


def mean_absolute_error_reference(y, target):
    return sum(abs(a - b) for a, b in zip(y.flat, target.flat, strict=True)) / y.size


# cases: per image (name, shape) or a function of the count, replicated (name, shape)

CONVOLUTIONS = {
    "plain": ((4, 5, 6), (3, 4, 3, 3), {}),
    "one by one": ((3, 4, 3), (5, 3, 1, 1), {}),
    "same": ((2, 4, 5), (3, 2, 3, 3), {"padding": 1}),
    "stride, pixels left over": ((2, 6, 8), (3, 2, 3, 3), {"stride": (2, 3)}),
    "asymmetric padding": ((2, 3, 4), (3, 2, 2, 3), {"padding": ((0, 2), (3, 1))}),
    "dilation": ((2, 6, 7), (2, 2, 3, 2), {"dilation": (2, 3)}),
    "groups": ((4, 4, 4), (6, 2, 3, 3), {"groups": 2, "padding": (1, 0)}),
    "by channel": ((3, 4, 4), (6, 1, 3, 3), {"groups": 3}),
    "all at once": (
        (4, 7, 6),
        (4, 2, 3, 2),
        {"stride": (2, 1), "padding": ((1, 2), (0, 1)), "dilation": (1, 2), "groups": 2},
    ),
}


def pair(value):
    return (value, value) if isinstance(value, int) else value


def convolution(image, weight, options):
    padding = tuple(pair(side) for side in pair(options.get("padding", 0)))
    how = (
        pair(options.get("stride", 1)),
        padding,
        pair(options.get("dilation", 1)),
        options.get("groups", 1),
    )
    return (
        lambda x, w, b: dl.conv2d(x, w, b, **options),
        lambda x, w, b: conv2d_reference(x, w, b, *how),
        [image],
        [weight, weight[:1]],
    )


# name: (op, reference, shapes of one image's values, shapes of replicated values)
CASES = {f"conv2d, {name}": convolution(*case) for name, case in CONVOLUTIONS.items()} | {
    "batchnorm": (dl.batchnorm, batchnorm_reference, [(3, 2, 4)], [(3,), (3,)]),
    "batchnorm of features": (dl.batchnorm, batchnorm_reference, [(4,)], [(4,), (4,)]),
    "relu": (dl.relu, lambda x: x * (x > 0), [(3, 2, 2)], []),
    "dense": (dl.dense, dense_reference, [(7,)], [(4, 7), (4,)]),
    "dense to one": (dl.dense, dense_reference, [(5,)], [(1, 5), (1,)]),
    "flatten": (dl.flatten, lambda x: x.reshape(len(x), -1), [(2, 3, 4)], []),
    "softmax": (dl.softmax, softmax_reference, [(6,)], []),
    "softmax_cross_entropy": (
        dl.softmax_cross_entropy,
        cross_entropy_reference,
        [(6,), ("labels",)],
        [],
    ),
    "softmax of pixels": (dl.softmax, softmax_of_pixels_reference, [(4, 3, 6)], []),
    "softmax_cross_entropy of pixels": (
        dl.softmax_cross_entropy,
        lambda x, labels: cross_entropy_reference(by_pixel(x), labels.ravel()),
        [(6, 2, 9), ("labels", 2, 9)],
        [],
    ),
    "softmax_cross_entropy, dimensions of 1": (
        dl.softmax_cross_entropy,
        lambda x, labels: cross_entropy_reference(by_pixel(x), labels.ravel()),
        [(6, 1, 3), ("labels", 3)],
        [],
    ),
    "mean_squared_error": (
        dl.mean_squared_error,
        mean_squared_error_reference,
        [(2, 3), (2, 3)],
        [],
    ),
    "mean_squared_error of numbers": (
        dl.mean_squared_error,
        mean_squared_error_reference,
        [(1,), ()],
        [],
    ),
    "mean_absolute_error": (
        dl.mean_absolute_error,
        mean_absolute_error_reference,
        [(1, 2, 3), (2, 3)],
        [],
    ),
    "mean": (dl.mean, lambda x: x.sum(axis=0) / len(x), [(2, 3)], []),
    "mean of numbers": (dl.mean, lambda x: x.sum() / len(x), [()], []),
    "sum": (dl.sum, lambda x: x.sum(axis=0), [(3, 2)], []),
    "add": (dl.add, lambda a, b: a + b, [(3, 2), (3, 2)], []),
    "add, broadcast": (dl.add, lambda a, b: a + b, [(3, 2, 2)], [(3, 1, 1)]),
    "operators": (
        lambda x, w: 2 - (-x) * w + x / 2 - 1 / (x + 3) + w - x,
        lambda x, w: 2 + x * w + x / 2 - 1 / (x + 3) + w - x,
        [(2, 3)],
        [(3,)],
    ),
    "subtract": (dl.subtract, lambda a, b: a - b, [(3,)], [(3,)]),
    "multiply": (dl.multiply, lambda a, b: a * b, [(3, 2), (3, 2)], []),
    "multiply, broadcast": (dl.multiply, lambda a, b: a * b, [(3, 2, 2)], [(3, 1, 2)]),
    "multiply by a number": (dl.multiply, lambda a, b: a * b, [(3, 2)], [()]),
    "divide": (lambda a, b: dl.divide(a, b + 3), lambda a, b: a / (b + 3), [(3,)], [(3,)]),
    "power": (lambda a: (a + 2) ** 3, lambda a: (a + 2) * (a + 2) * (a + 2), [(3, 2)], []),
    "exp, log, sqrt": (
        lambda a: dl.log(dl.sqrt(a + 2) + dl.exp(a)),
        lambda a: np.log((a + 2) ** 0.5 + np.e**a),
        [(4,)],
        [],
    ),
    "negative": (dl.negative, lambda a: -a, [(2,)], []),
}


def arrays(case, count, dtype=np.float64):
    """Of a case: (op, reference, per-image arrays of `count` images, replicated arrays)."""
    op, reference, images, replicated = CASES[case]
    made = [
        np.arange(count * math.prod(shape[1:])).reshape(count, *shape[1:]) * 7 % 6
        if shape[:1] == ("labels",)
        else numbers(f"{case} {i}", count, *shape)
        for i, shape in enumerate(images)
    ]
    made = [a if a.dtype.kind == "i" else a.astype(dtype) for a in made]
    weights = [numbers(f"{case} w{i}", *s, dtype=dtype) for i, s in enumerate(replicated)]
    return op, reference, made, weights


def share_of(world, images, replicated):
    values = blocked(world, *images)
    return [*(values if isinstance(values, tuple) else (values,)), *replicated]


def plain(world, value):
    """A result as a plain array, the same on every rank."""
    value = tape.value_of(value)
    return world.gplus(value) if isinstance(value, dl.Partial) else all_images(world, value)


def gradients(world, op, args):
    """The result and every argument's cotangent, for a fixed cotangent of the result."""
    variables = [dl.Var(a, name="x") if a.dtype.kind == "f" else a for a in args]
    y = op(*variables)
    if isinstance(y.value, dl.Blocked):
        seed = blocked(world, numbers("dy", *y.shape, dtype=y.dtype), batch=y.value.batch)
    else:
        seed = numbers("dy", *y.shape, dtype=y.dtype)
    result = plain(world, y)
    found = tape.backward(y, seed, fold=world.gplus)
    cotangents = []
    for variable in variables:
        if isinstance(variable, dl.Var):
            d = found[variable]
            if isinstance(d, dl.Blocked):  # every cotangent owes its readers zeros there
                assert np.array_equal(zero_unused(d.lanes.copy(), d.batch), d.lanes)
            cotangents.append(plain(world, d) if not isinstance(d, np.ndarray) else d)
    return result, cotangents


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [5, 37])
def test_against_the_reference_in_both_types(world, case, count):
    op, reference, images, replicated = arrays(case, count)
    expected = reference(*images, *replicated)
    result, exact = gradients(world, op, share_of(world, images, replicated))
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-13)

    single = [a if a.dtype.kind == "i" else a.astype("f4") for a in images]
    args = share_of(world, single, [w.astype("f4") for w in replicated])
    result, rounded = gradients(world, op, args)
    for found, wanted in zip([result, *rounded], [expected, *exact], strict=True):
        assert found.shape == wanted.shape
        assert abs(found - wanted).max() <= 1e-5 * max(abs(wanted).max(), 1e-2)
    assert all(d.dtype == np.float32 for d in rounded)


@pytest.mark.parametrize("case", CASES)
def test_vjp_along_random_directions(world, case):
    for count in (5, 37):
        op, _, images, replicated = arrays(case, count)
        dl.check_vjp(op, *share_of(world, images, replicated), seed=count, tolerance=2e-7)


@pytest.mark.parametrize("case", CASES)
def test_last_blocks_of_every_size(world, case):
    """Forward against the reference, and the vjp, where the last block holds 1 to 15 images."""
    for held in range(1, LANES):
        op, reference, images, replicated = arrays(case, LANES + held)
        if "conv2d" not in case or held in (1, 15):  # the slow reference
            found = plain(world, op(*share_of(world, images, replicated)))
            np.testing.assert_allclose(
                found, reference(*images, *replicated), rtol=1e-11, atol=1e-13
            )
        if held in (1, 7, 15):
            dl.check_vjp(op, *share_of(world, images, replicated), tolerance=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [5, 37])
def test_one_result_on_any_number_of_ranks(world, case, count):
    op, _, images, replicated = arrays(case, count, np.float32)
    alone, ours = SingleRank(), world
    expected = gradients(alone, op, share_of(alone, images, replicated))
    found = gradients(ours, op, share_of(ours, images, replicated))
    assert found[0].tobytes() == expected[0].tobytes()
    assert [d.tobytes() for d in found[1]] == [d.tobytes() for d in expected[1]]


@pytest.mark.parametrize("case", CASES)
def test_unused_lanes_do_not_matter(world, case):
    """Whatever lies in the unused lanes of a value, results and sums keep their bytes."""
    op, _, images, replicated = arrays(case, 21, np.float32)
    clean = share_of(world, images, replicated)
    dirty = []
    for value in clean:
        if isinstance(value, dl.Blocked) and value.dtype.kind == "f":
            lanes = value.lanes.copy()
            if value.batch.blocks and value.batch.images[1] == 21:
                lanes[-1, ..., 21 % LANES :] = 1e30
                lanes[-1, ..., -1] = -1e30
            value = value.like(lanes)
        dirty.append(value)
    expected = gradients(world, op, clean)
    with np.errstate(all="ignore"):
        found = gradients(world, op, dirty)
    assert found[0].tobytes() == expected[0].tobytes()
    assert [d.tobytes() for d in found[1]] == [d.tobytes() for d in expected[1]]


@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith("batchnorm")])
def test_a_share_without_blocks(case):
    """What a rank does that has no block, seen from that rank alone."""
    idle = SimpleNamespace(rank=1, size=2)
    op, reference, images, replicated = arrays(case, 5)
    batch = dl.share(5, idle)
    args = [
        dl.Var(dl.from_images(a[:0], batch))
        if a.dtype.kind == "f"
        else dl.from_images(a[:0], batch)
        for a in images
    ]
    weights = [dl.Var(w) for w in replicated]
    y = op(*args, *weights)
    assert y.shape == np.shape(reference(*images, *replicated))
    if isinstance(y.value, dl.Blocked):
        seed = dl.from_images(np.zeros((0, *y.value.image_shape)), batch)
    else:
        assert y.value.terms[0].nodes == []
        seed = np.ones(y.shape)
    found = tape.backward(y, seed, fold=lambda partial: np.zeros(partial.shape))
    for variable in [a for a in args if isinstance(a, dl.Var)]:
        assert found[variable].lanes.shape == variable.value.lanes.shape
    for variable in weights:
        assert found[variable].shape == variable.shape
        terms = getattr(found[variable], "terms", [])  # none where it was folded on the way
        assert all(term.nodes == [] for term in terms)


# replicated ops


@pytest.mark.parametrize(
    "f, reference",
    [
        (lambda w: dl.total(w**2), lambda w: (w * w).sum()),
        (lambda w: dl.total(w, axis=(0, 2)), lambda w: np.einsum("ijk->j", w)),
        (lambda w: dl.total(dl.exp(w), axis=1), lambda w: np.exp(w).sum(axis=1)),
        (lambda w: dl.transpose(w), lambda w: np.einsum("ijk->kji", w)),
        (lambda w: dl.transpose(w, (1, 2, 0)), lambda w: np.einsum("ijk->jki", w)),
        (lambda w: dl.reshape(w, (6, 4)), lambda w: w.reshape(6, 4)),
        (lambda w: 2.0 / dl.sqrt(w + 3) - w**-2, lambda w: 2 / np.sqrt(w + 3) - 1 / (w * w)),
        (lambda w: w / dl.total(w) * 3, lambda w: w / w.sum() * 3),
    ],
)
def test_ops_on_learnables_alone(f, reference):
    w = numbers("replicated", 2, 3, 4, low=0.5)
    np.testing.assert_allclose(f(dl.Var(w)).value, reference(w), rtol=1e-13)
    assert dl.check_vjp(f, w) < 1e-7


# what only some ops have


def test_the_first_layer_asks_for_no_gradient_of_the_images(world, monkeypatch):
    from mpidl.backends.reference import conv

    monkeypatch.setattr(conv, "conv2d_dx", None)  # calling it would fail
    x = blocked(world, numbers("images", 20, 2, 4, 4))
    w, b = dl.Var(numbers("w", 3, 2, 3, 3)), dl.Var(np.zeros(3))
    y = dl.conv2d(x, w, b)
    assert set(tape.backward(y, y.value)) == {w, b}


def test_softmax_and_cross_entropy_of_large_scores(world):
    x, labels = np.zeros((20, 3)), np.arange(20) % 3
    x[:, 0], x[:, 1] = 1000, -1000
    scores, labels = blocked(world, x.astype("f4"), labels)
    assert all_images(world, dl.softmax(scores))[0].tolist() == [1, 0, 0]
    loss = world.gplus(dl.softmax_cross_entropy(scores, labels))
    assert loss == pytest.approx((7 * 0 + 7 * 2000 + 6 * 1000) / 20)


def test_correct_count(world):
    x = np.array([[1, 2, 0], [3, 1, 3], [0, 0, 0], [0, 0, 5]] * 5, "f4")
    labels = np.array([1, 2, 0, 2] * 5)  # right; a tie, where the first class counts; right; right
    assert world.gplus(dl.correct_count(*blocked(world, x, labels))) == 15
    pixels = np.moveaxis(x.reshape(5, 2, 2, 3), -1, 1)  # of 5 images of 2 x 2
    found = dl.correct_count(*blocked(world, pixels, labels.reshape(5, 2, 2)))
    assert world.gplus(found) == 15


def test_losses_and_their_gradients_are_those_of_pytorch(world):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    functional = torch.nn.functional
    scores, labels = numbers("scores", 21, 5, 3, 4), np.arange(21 * 12).reshape(21, 3, 4) * 7 % 5
    y, target = numbers("y", 21, 2, 3, 4), numbers("target", 21, 2, 3, 4)
    for ours, theirs, x, other in (
        (dl.softmax_cross_entropy, functional.cross_entropy, scores, labels),
        (dl.softmax_cross_entropy, functional.cross_entropy, scores[:, :, 0, 0], labels[:, 0, 0]),
        (dl.mean_squared_error, functional.mse_loss, y, target),
        (dl.mean_absolute_error, functional.l1_loss, y, target),
    ):
        for dtype, tolerance in (np.float64, 1e-13), (np.float32, 2e-6):
            cast = other if other.dtype.kind == "i" else other.astype(dtype)
            known = torch.tensor(x, requires_grad=True)
            expected = theirs(known, torch.tensor(other))
            expected.backward()
            var = dl.Var(blocked(world, x.astype(dtype)), name="x")
            loss = ours(var, blocked(world, cast, batch=var.value.batch))
            assert abs(world.gplus(loss.value) - expected.item()) <= tolerance
            (found,) = tape.backward(loss, np.ones(()), fold=world.gplus).values()
            error = abs(all_images(world, found) - known.grad.numpy()).max()
            assert error <= tolerance * abs(known.grad.numpy()).max()


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda x, f, i: dl.conv2d(f, np.ones((2, 3, 1, 1)), np.ones(2)),
            ValueError,
            "conv2d: exp",
        ),
        (
            lambda x, f, i: dl.conv2d(x, np.ones((2, 3, 1, 1)), np.ones(2)),
            ValueError,
            r"\(K, 2/gro",
        ),
        (
            lambda x, f, i: dl.conv2d(x, np.ones((2, 2, 1, 1)), np.ones(3)),
            ValueError,
            r"bias \(2,\)",
        ),
        (lambda x, f, i: dl.conv2d(x, np.ones((2, 2, 5, 1)), np.ones(2)), ValueError, "leave noth"),
        (
            lambda x, f, i: dl.conv2d(x, np.ones((2, 2, 1, 1)), np.ones(2), stride=0),
            ValueError,
            "stride must be an integer >= 1",
        ),
        (
            lambda x, f, i: dl.conv2d(x, np.ones((2, 2, 1, 1)), np.ones(2), padding=(1, 2, 3)),
            ValueError,
            "padding must be",
        ),
        (
            lambda x, f, i: dl.conv2d(np.ones(3), None, None),
            TypeError,
            "expected a value per image",
        ),
        (
            lambda x, f, i: dl.batchnorm(x, np.ones(3), np.ones(3)),
            ValueError,
            "batchnorm: expected",
        ),
        (
            lambda x, f, i: dl.batchnorm(x, np.ones(2), np.ones(2), scope="all"),
            ValueError,
            "'global' or 'local', got 'all'",
        ),
        (lambda x, f, i: dl.dense(x, np.ones((2, 3)), np.ones(2)), ValueError, "dense: expected"),
        (lambda x, f, i: dl.dense(f, np.ones((2, 4)), np.ones(2)), ValueError, r"weight \(K, 3\)"),
        (lambda x, f, i: dl.softmax_cross_entropy(f, f), TypeError, "expected labels as integers"),
        (
            lambda x, f, i: dl.softmax_cross_entropy(x, i),
            ValueError,
            r"expected labels of shape \(\d+, 4, 4\), one for each pixel of scores .*, 2, 4, 4\)",
        ),
        (
            lambda x, f, i: dl.softmax_cross_entropy(i, i),
            ValueError,
            r"expected scores \(N, K\) or",
        ),
        (lambda x, f, i: dl.softmax(i), ValueError, r"softmax: expected \(N, K\) or"),
        (lambda x, f, i: dl.mean_squared_error(f, i), ValueError, "target of shape"),
        (lambda x, f, i: dl.mean_squared_error(f, f.lanes), TypeError, "target: .* ndarray; "),
        (
            lambda x, f, i: dl.mean_absolute_error(x, f),
            ValueError,
            "target of shape",
        ),
        (lambda x, f, i: dl.mean_squared_error(i, i), TypeError, "target of floats, got int64"),
        (lambda x, f, i: dl.total(x), TypeError, "dl.sum and dl.mean"),
    ],
)
def test_errors_say_what_was_expected(world, call, error, message):
    batch = dl.share(16 * world.size, world)
    x, f, i = (
        dl.from_images(np.zeros((16, *shape), dtype), batch)
        for shape, dtype in (((2, 4, 4), "f4"), ((3,), "f4"), ((), "i8"))
    )
    with pytest.raises(error, match=message):
        call(x, f, i)


def test_labels_beyond_the_classes_are_told(world):
    batch = dl.share(16 * world.size, world)
    scores = dl.from_images(np.zeros((16, 3), "f4"), batch)
    for wrong in (3, -1):
        labels = dl.from_images(np.full(16, wrong), batch)
        with pytest.raises(ValueError, match=r"labels in 0\.\.2, .* got "):
            dl.softmax_cross_entropy(scores, labels)
        pixels = np.ones((16, 2, 5), np.int32)
        pixels[3, 1, 4] = wrong
        for op in dl.softmax_cross_entropy, dl.correct_count:
            with pytest.raises(ValueError, match=r"labels in 0\.\.2, .* got "):
                op(
                    dl.from_images(np.zeros((16, 3, 2, 5), "f4"), batch),
                    dl.from_images(pixels, batch),
                )
