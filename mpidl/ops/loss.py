"""Sums over the images of a mini-batch, and losses."""

import math

import numpy as np

from mpidl import backends
from mpidl.autodiff.tape import op, refuse_gpu, value_of
from mpidl.blocks import LANES, Blocked, zero_unused
from mpidl.ops import check


@op(blocks=True)
def sum(x):
    """The sum over the images of the global mini-batch, in float64.

    x: (N, ...); returns a Partial of shape (...).
    """
    check.images("sum", x)
    refuse_gpu("sum", x)
    batch = x.batch

    def vjp(dy, needs):
        lanes = np.empty_like(x.lanes)
        lanes[...] = np.asarray(dy, x.dtype)[..., None]
        return (x.like(zero_unused(lanes, batch)),)

    return backends.of(x).image_sums(x.lanes, batch.counts(), batch.tree), vjp


def mean(x):
    """The mean over the images of the global mini-batch (however many ranks hold them).

    x: (N, ...); returns a Partial of shape (...): one number of (N,), three of (N, 3).
    """
    return multiply_partial(sum(x), 1.0 / x.shape[0])


@op(blocks=True)
def multiply_partial(x, factor):
    """A Partial times a replicated number, which may itself be differentiated."""
    value = float(np.asarray(factor))

    def vjp(dy, needs):
        dfactor = x * float(dy) if needs[1] and x.shape == () else None
        if needs[1] and dfactor is None:
            raise TypeError(
                "the factor of a Partial can be differentiated only if it is one number"
            )
        return (dy * value if needs[0] else None, dfactor)

    return x * value, vjp


def labels_of(name, labels, scores):
    """The lanes of labels that go with scores (N, K, ...): integers in 0..K-1, (N, ...), or of a
    shape that differs from it by dimensions of 1 alone.

    TypeError for others than integers, ValueError for another shape and for labels beyond K - 1.
    """
    if not isinstance(labels, Blocked):
        raise TypeError(
            f"{name}: expected labels as integers, one an image (Blocked), got "
            f"{type(labels).__name__}; {check.BLOCKED}"
        )
    if labels.dtype.kind not in "iu":
        raise TypeError(
            f"{name}: expected labels as integers, got {labels.dtype} of shape {labels.shape}"
        )
    classes, *pixels = scores.image_shape
    if squeezed(labels.image_shape) != squeezed(pixels):
        raise ValueError(
            f"{name}: expected labels of shape {(scores.shape[0], *pixels)}, one for each "
            f"{'pixel' if pixels else 'image'} of scores {scores.shape}, got {labels.shape}"
        )
    lanes = labels.lanes.reshape(len(labels.lanes), *pixels, LANES)
    if not lanes.size:
        return lanes

    def check_bounds(low, high):
        if not 0 <= low <= high < classes:
            raise ValueError(
                f"{name}: expected labels in 0..{classes - 1}, the classes of the scores, got "
                f"{low}..{high}"
            )

    if isinstance(lanes, np.ndarray):
        check_bounds(lanes.min(), lanes.max())
    else:  # on a GPU: as the host knows them
        labels.lanes.bounds.hold(check_bounds)
    return lanes


def squeezed(shape):
    """A shape without its dimensions of 1."""
    return tuple(n for n in shape if n != 1)


@op(blocks=True)
def softmax_cross_entropy(logits, labels):
    """Mean over all images of the global mini-batch, and all their pixels, of
    -log softmax(logits)[label], the softmax being over the K classes.

    logits: (N, K) or (N, K, ...), scores of each pixel; labels: (N,) or (N, ...), integers in
    0..K-1; returns a Partial, one number (float64).
    """
    _check_scores("softmax_cross_entropy", logits)
    lanes = labels_of("softmax_cross_entropy", labels, logits)
    backend, batch = backends.of(logits), logits.batch
    counts, each = batch.counts(), batch.per_image * (1.0 / math.prod(logits.image_shape[1:]))
    total = backend.cross_entropy(logits.lanes, lanes, counts, batch.tree)

    def vjp(dy, needs):
        d = backend.cross_entropy_dlogits(logits.lanes, lanes, each * float(dy), counts)
        return logits.like(d), None

    return total * each, vjp


def _check_scores(name, scores):
    check.images(name, scores)
    if len(scores.shape) < 2:
        raise ValueError(f"{name}: expected scores (N, K) or (N, K, ...), got {scores.shape}")


@op(blocks=True)
def mean_squared_error(y, target):
    """Mean of (y - target)**2 over all elements of the global mini-batch.

    y: (N, ...) floats; target: of the same shape, or of one that differs by dimensions of 1 alone
    (a number an image, (N,), goes with outputs (N, 1)); returns a Partial, one number (float64).
    (MATLAB's `mse` sums over an image's elements and halves.)
    """
    return _mean_error("mean_squared_error", y, target, 2)


@op(blocks=True)
def mean_absolute_error(y, target):
    """Mean of |y - target| over all elements of the global mini-batch; where they are equal the
    gradient is 0. y, target and result as of `mean_squared_error`."""
    return _mean_error("mean_absolute_error", y, target, 1)


def _mean_error(name, y, target, power):
    check.images(name, y)
    check.images(f"{name}: target", target)
    fits = squeezed(target.shape[1:]) == squeezed(y.shape[1:])
    if not fits or target.shape[0] != y.shape[0]:
        raise ValueError(f"{name}: expected a target of shape {y.shape}, got {target.shape}")
    if target.dtype.kind != "f":
        raise TypeError(f"{name}: expected a target of floats, got {target.dtype}")
    backend, batch, lanes = backends.of(y), y.batch, y.lanes
    wanted = target.lanes.reshape(lanes.shape)
    wanted = wanted if wanted.dtype == y.dtype else wanted.astype(y.dtype)
    counts, each = batch.counts(), batch.per_image * (1.0 / math.prod(y.image_shape))
    total = backend.errors(lanes, wanted, power, counts, batch.tree)

    def vjp(dy, needs):
        def slope(one, other):
            return backend.errors_dy(one, other, power, each * (power * float(dy)), counts)

        return (
            y.like(slope(lanes, wanted)) if needs[0] else None,
            target.like(slope(wanted, lanes).reshape(target.lanes.shape)) if needs[1] else None,
        )

    return total * each, vjp


def correct_count(logits, labels):
    """How many images', or pixels', largest score is their label's: a Partial. Not differentiable.

    logits: (N, K) or (N, K, ...); labels: (N,) or (N, ...). Among equal scores the first class
    counts.
    """
    logits = value_of(logits)
    _check_scores("correct_count", logits)
    lanes = labels_of("correct_count", labels, logits)
    batch = logits.batch
    return backends.of(logits).correct_count(logits.lanes, lanes, batch.counts(), batch.tree)
