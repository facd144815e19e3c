"""Compare losses and counts on every backend with the published formulas in float64.

The scores include NaN and infinities: a result is never finite if the formula's value is not.
"""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from conformance import Draw, fill_unused, host, placed, share
from cpu_builds import needs_kernels, on_all_builds

from mpidl.backends import CPU, REFERENCE
from mpidl.backends.gpu import array
from mpidl.backends.gpu.backend import GPU
from mpidl.backends.training_interface import BinaryRule, LabelRule, OverlapRule
from mpidl.core.blocks import LANES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, for NaN

K, IMAGES, SHAPE = 3, 21, (2, 2)
PIXELS = 4
SHARE = share(2, last=IMAGES - LANES)
IGNORED = 255
WEIGHTS = np.array([0.5, 2.0, 1.0])
SPOILT = 18  # the image with the special scores, in the second block
NAN, INF = np.nan, np.inf


# ---- the formulas; x (K, pixels) are the scores of an image, and y (pixels) are its labels ----


def log_softmax(x):
    shifted = x - x.max(axis=0)
    return shifted - np.log(np.exp(shifted).sum(axis=0))


def cross_entropy(x, y, weights=None, smoothing=0.0, gamma=0.0):
    """Szegedy et al., 2016, for smoothing; Lin et al., 2017, for gamma."""
    logs, weights, total = log_softmax(x), np.ones(len(x)) if weights is None else weights, 0.0
    for pixel in np.flatnonzero(y != IGNORED):
        log, k = logs[:, pixel], y[pixel]
        focus = (1 - np.exp(log[k])) ** gamma if gamma else 1.0
        total -= (1 - smoothing) * weights[k] * focus * log[k]
        if smoothing:
            total -= smoothing / len(x) * sum(weights * log)
    return total


def soft_cross_entropy(x, q, smoothing=0.0):
    q, logs = (1 - smoothing) * q + smoothing / len(q), log_softmax(x)
    return -sum(q[q > 0] * logs[q > 0])  # 0 log 0 is 0


def binary_cross_entropy(x, t, weights=None, gamma=0.0):
    total = 0.0
    for k in range(len(x)):
        for score, target in zip(x[k], t[k], strict=True):
            p = 1 / (1 + np.exp(-score))
            weight = 1.0 if weights is None else weights[k]
            if target == 1:
                total -= weight * (1 - p) ** gamma * np.log(p)
            elif target == 0:
                total -= p**gamma * np.log(1 - p)
    return total


def dice(x, y, weights=None, smooth=1.0, generalized=False):
    """Milletari et al., 2016, or Sudre et al., 2017, with an epsilon."""
    single, counted = len(x) == 1, y != IGNORED
    p = 1 / (1 + np.exp(-x)) if single else np.exp(log_softmax(x))
    p = p[:, counted]
    g = np.array([y[counted] == k + single for k in range(len(x))])
    w = np.ones(len(x)) if weights is None else weights
    overlaps, sizes = (p * g).sum(axis=1), (p**2).sum(axis=1) + g.sum(axis=1)
    if generalized:
        n = g.sum(axis=1).astype(np.float64)
        n[n == 0] = min(n[n > 0], default=1)
        overlap, size = sum(w / n**2 * overlaps), sum(w / n**2 * sizes)
        return 1 - (2 * overlap + smooth) / (size + smooth) if size + smooth != 0 else 0.0
    losses = [
        1 - (2 * overlap + smooth) / (size + smooth) if size + smooth != 0 else 0.0
        for overlap, size in zip(overlaps, sizes, strict=True)
    ]
    return sum(w / w.sum() * losses)


def tversky(x, y, alpha, beta):
    """Salehi et al., 2017, with smoothing by half a pixel."""
    single, counted = len(x) == 1, y != IGNORED
    p = 1 / (1 + np.exp(-x)) if single else np.exp(log_softmax(x))
    p = p[:, counted]
    g = np.array([y[counted] == k + single for k in range(len(x))])
    right = (p * g).sum(axis=1) + 0.5
    errors = alpha * (p * ~g).sum(axis=1) + beta * ((1 - p) * g).sum(axis=1)
    return (1 - right / (right + errors)).mean()


def correct(x, y):
    """Accuracy has no value if the largest score is unknown."""
    counted = x[:, y != IGNORED]
    return NAN if np.isnan(counted).any() else sum(counted.argmax(axis=0) == y[y != IGNORED])


def binary_correct(x, t):
    counted = (t == 0) | (t == 1)
    return NAN if np.isnan(x[counted]).any() else sum((x > 0)[counted] == (t[counted] == 1))


def soft_correct(x, q):
    chances = np.take_along_axis(q, x.argmax(axis=0)[None], axis=0)
    return NAN if np.isnan(x).any() else chances.sum()


# ---- the table: {name: (function of the backend, formula, kind of targets)} ----

LOSSES = {}


def add(name, function, formula, targets, gradient=None, classes=K):
    LOSSES[name] = SimpleNamespace(
        function=function, formula=formula, targets=targets, gradient=gradient, classes=classes
    )


def add_loss(name, function, formula, targets, *options, **keywords):
    """Add a loss whose gradient is the function of the same name with "_d<argument>"."""
    argument = {"errors": "dy"}.get(function, "dlogits")

    def loss(b, a):
        return getattr(b, function)(a.x, a.y, *options, a.counts, a.tree, **keywords)

    def gradient(b, a):
        return getattr(b, f"{function}_{argument}")(a.x, a.y, *options, 0.5, a.counts, **keywords)

    add(name, loss, formula, targets, gradient)


def add_overlap(name, rule, formula, classes=K):
    def chances(b, x):
        return b.elementwise("sigmoid", x).astype(np.float64) if classes == 1 else b.softmax(x)

    def loss(b, a):
        return b.overlap(chances(b, a.x), a.y, a.counts, a.tree, rule)[0]

    def gradient(b, a):
        p = chances(b, a.x)
        slopes = b.overlap(p, a.y, a.counts, a.tree, rule)[1]
        return b.overlap_dp(p, a.y, slopes, 0.5, a.counts, rule)

    add(name, loss, formula, "labels", gradient, classes)


for name, rule in {
    "cross_entropy": LabelRule(),
    "cross_entropy, weighted": LabelRule(WEIGHTS),
    "cross_entropy, smoothed": LabelRule(WEIGHTS, 0.3),
    "cross_entropy, focal": LabelRule(None, 0.0, 2.0),
}.items():
    formula = functools.partial(cross_entropy, weights=rule[0], smoothing=rule[1], gamma=rule[2])
    add_loss(name, "cross_entropy", formula, "labels", rule=rule)
for smoothing in (0.0, 0.2):
    formula = functools.partial(soft_cross_entropy, smoothing=smoothing)
    name = f"soft_cross_entropy, {smoothing}"
    add_loss(name, "soft_cross_entropy", formula, "chances", smoothing=smoothing)
for name, rule in {
    "binary_cross_entropy": BinaryRule(),
    "binary_cross_entropy, focal": BinaryRule(WEIGHTS, 1.5),
}.items():
    formula = functools.partial(binary_cross_entropy, weights=rule[0], gamma=rule[1])
    add_loss(name, "binary_cross_entropy", formula, "binary", rule=rule)
add_loss("mse", "errors", lambda x, t: ((x - t) ** 2).sum(), "numbers", 2)
add_loss("mae", "errors", lambda x, t: abs(x - t).sum(), "numbers", 1)
for name, rule in {
    "dice": OverlapRule(),
    "dice, weighted, not smoothed": OverlapRule(WEIGHTS, 0.0),
    "dice, generalized": OverlapRule(None, 1e-8, True),
    "dice, generalized, weighted": OverlapRule(WEIGHTS, 0.0, True),
}.items():
    formula = functools.partial(dice, weights=rule[0], smooth=rule[1], generalized=rule[2])
    add_overlap(name, rule, formula)
    if rule.class_weights is None:
        add_overlap(f"{name}, one output", rule, formula, classes=1)
for classes in (1, K):
    rule = OverlapRule(None, 1.0, is_squared=False, below=-2.2, chances=0.4, labelled=3.8)
    formula = functools.partial(tversky, alpha=0.2, beta=1.9)
    add_overlap(f"tversky, {classes} outputs", rule, formula, classes=classes)
for name, formula, targets in (
    ("correct_count", correct, "labels"),
    ("soft_correct_count", soft_correct, "chances"),
    ("binary_correct_count", binary_correct, "binary"),
):
    add(name, lambda b, a, n=name: getattr(b, n)(a.x, a.y, a.counts, a.tree), formula, targets)

# ---- scores and targets ----

SPECIAL = {  # {name: function that changes the scores of the spoilt image, (K, pixels)}
    "finite": lambda x: None,
    **{
        f"{name} in class {k}": lambda x, number=number, k=k: x[k].__setitem__(0, number)
        for name, number in {"nan": NAN, "inf": INF, "-inf": -INF}.items()
        for k in (0, -1)
    },
    "all nan": lambda x: x.fill(NAN),
    "all inf": lambda x: x.fill(INF),
    "all -inf": lambda x: x.fill(-INF),
}
LABELS = {  # {name: function that changes the labels of the spoilt image, (pixels)}
    "first": lambda y: y.__setitem__(0, 0),
    "last": lambda y: y.__setitem__(0, K - 1),
    "ignored": lambda y: y.__setitem__(0, IGNORED),
    "all ignored": lambda y: y.fill(IGNORED),
    "one class": lambda y: y.fill(1),
}


def scores(classes, special):
    x = np.random.default_rng(1).uniform(-3, 3, (IMAGES, classes, PIXELS)).astype(np.float32)
    SPECIAL[special](x[SPOILT])
    return x


def targets(kind, classes, labels):
    rng = np.random.default_rng(2)
    y = rng.integers(0, max(classes, 2), (IMAGES, PIXELS)).astype(np.int32)
    LABELS[labels](y[SPOILT])
    if classes == 1:
        y[y == K - 1] = 1
    if kind == "labels":
        return y
    is_class = y[:, None] == np.arange(classes)[None, :, None]
    if kind == "binary":
        return np.where(y[:, None] == IGNORED, -1, is_class).astype(np.int32)
    return is_class.astype(np.float32)


def lanes(values):
    """Convert images (n, ..., pixels) to lanes, with NaN or invalid labels in unused lanes."""
    padded = np.zeros((2, LANES, *values.shape[1:-1], *SHAPE), values.dtype)
    padded.reshape(2 * LANES, *values.shape[1:])[:IMAGES] = values
    result = np.ascontiguousarray(np.moveaxis(padded, 1, -1))
    fill_unused(result, SHARE.counts, NAN if values.dtype.kind == "f" else 1 << 30)
    return result


def arguments(backend, loss, special, labels):
    x, y = scores(loss.classes, special), targets(loss.targets, loss.classes, labels)
    values = [placed(backend, Draw("lanes"), lanes(v), backend is REFERENCE) for v in (x, y)]
    counts = array.plain(np.array([IMAGES], np.int32)) if backend is GPU else SHARE.counts
    exact = [loss.formula(*pair) for pair in zip(x.astype(np.float64), y, strict=True)]
    return SimpleNamespace(x=values[0], y=values[1], counts=counts, tree=SHARE.tree), exact


def sum_of(partial):
    (term,) = partial.terms
    (root,) = host(partial)
    return float(np.asarray(root).reshape(()))


def assert_not_hidden(backend, loss, all_labels=LABELS):
    """Check the loss and its gradient for every special score and label."""
    for special in SPECIAL:
        for labels in all_labels:
            a, exact = arguments(backend, loss, special, labels)
            value, expected = sum_of(loss.function(backend, a)), sum(exact)
            message = f"{special}, {labels}: expected {expected}, found {value}"
            if np.isfinite(expected):
                is_near = abs(value - expected) <= 2e-7 * max(abs(expected), 1)
                assert is_near or (np.isnan(value) and special != "finite"), message
            else:
                assert not np.isfinite(value), message
            if loss.gradient and np.isnan(exact[SPOILT]):
                d = host(loss.gradient(backend, a))[1, ..., SPOILT - LANES]
                assert np.isnan(d).any(), f"gradient of {special}, {labels}"


of_losses = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


@of_losses
def test_on_the_reference(loss):
    assert_not_hidden(REFERENCE, loss)


@needs_kernels
@of_losses
def test_on_cpus(loss):
    on_all_builds(lambda: assert_not_hidden(CPU, loss))


@of_losses
def test_on_a_gpu(device, loss):
    assert_not_hidden(GPU, loss, ("first", "ignored", "all ignored"))


def assert_generalized_dice(backend, size):
    """Compare the loss and its gradient with the formula for classes of very different sizes."""
    labels = np.zeros((LANES, size, size), np.int32)
    labels[0, 0, : size // 2], labels[1, :, size // 2 :], labels[:2, 1, 0] = 1, 1, 2
    p = np.random.default_rng(3).dirichlet([0.3] * 4, (LANES, size, size)).astype(np.float64)
    p, owned = np.moveaxis(p, -1, 1), share(1, last=2)
    g, p2 = (labels[:2, None] == np.arange(4)[:, None, None]).astype(np.float64), p[:2]
    n = g.sum(axis=(2, 3), keepdims=True)
    v = 1 / np.where(n > 0, n, np.where(n > 0, n, INF).min(axis=1, keepdims=True)) ** 2
    numerator = 2 * (v * p2 * g).sum(axis=(1, 2, 3), keepdims=True) + 1e-8
    denominator = (v * (p2**2 + g)).sum(axis=(1, 2, 3), keepdims=True) + 1e-8
    dp = 2 * v * (numerator / denominator * p2 - g) / denominator

    placed_p, placed_labels = (
        placed(backend, Draw("lanes"), np.moveaxis(a, 0, -1)[None].copy(), False)
        for a in (p, labels)
    )
    counts = array.plain(np.array([2], np.int32)) if backend is GPU else owned.counts
    rule = OverlapRule(None, 1e-8, True)
    loss, slopes = backend.overlap(placed_p, placed_labels, counts, owned.tree, rule)
    assert sum_of(loss) == pytest.approx(2 - (numerator / denominator).sum(), rel=1e-12)
    d = host(backend.overlap_dp(placed_p, placed_labels, slopes, 1.0, counts))[0]
    for i in range(2):
        assert abs(d[..., i] - dp[i]).max() <= 1e-6 * abs(dp[i]).max()
    assert not d[..., 2:].any()


SIZES = pytest.mark.parametrize("size", [4, 64, 256])


@SIZES
@pytest.mark.parametrize("backend", [REFERENCE, pytest.param(CPU, marks=needs_kernels)])
def test_generalized_dice_of_rare_classes(backend, size):
    if backend is CPU:
        on_all_builds(lambda: assert_generalized_dice(CPU, size))
    else:
        assert_generalized_dice(backend, size)


@SIZES
def test_generalized_dice_of_rare_classes_on_a_gpu(device, size):
    assert_generalized_dice(GPU, size)
