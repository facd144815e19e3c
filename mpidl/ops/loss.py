"""Sums over the images of a mini-batch, and losses."""

import numpy as np

from mpidl import backends
from mpidl.blocks import Blocked, zero_unused
from mpidl.fold import Counter
from mpidl.ops import check
from mpidl.tape import op, refuse_gpu, value_of


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

    x: (N, ...); returns a Partial of shape (...).
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


def check_labels(name, labels, classes):
    """Labels must be one integer class index per image, below `classes`."""
    if not isinstance(labels, Blocked) or labels.image_shape or labels.dtype.kind not in "iu":
        found = f"{labels.dtype} of shape {labels.shape}" if isinstance(labels, Blocked) else labels
        raise TypeError(f"{name}: expected labels as integers, one per image, got {found!r}")
    if not labels.lanes.size:
        return

    def check_bounds(low, high):
        if not 0 <= low <= high < classes:
            raise ValueError(
                f"{name}: expected labels in 0..{classes - 1}, the classes of the scores, got "
                f"{low}..{high}"
            )

    if isinstance(labels.lanes, np.ndarray):
        check_bounds(labels.lanes.min(), labels.lanes.max())
    else:  # on a GPU: as the host knows them
        labels.lanes.bounds.hold(check_bounds)


@op(blocks=True)
def softmax_cross_entropy(logits, labels):
    """Mean over the global mini-batch of -log softmax(logits)[label].

    logits: (N, K); labels: (N,) integers in 0..K-1; returns a Partial, one number (float64).
    """
    check.images("softmax_cross_entropy", logits, 2)
    check_labels("softmax_cross_entropy", labels, logits.shape[1])
    backend, batch = backends.of(logits), logits.batch
    counts = batch.counts()
    total = backend.cross_entropy(logits.lanes, labels.lanes, counts, batch.tree)

    def vjp(dy, needs):
        scale = batch.per_image * float(dy)
        d = backend.cross_entropy_dlogits(logits.lanes, labels.lanes, scale, counts)
        return logits.like(d), None

    return total * batch.per_image, vjp


@op(blocks=True)
def mean_squared_error(y, target):
    """Mean of (y - target)**2 over all elements of the global mini-batch.

    y, target: (N, ...), the same shape; returns a Partial, one number (float64). (MATLAB's `mse`
    sums over an image's elements and halves.)
    """
    check.images("mean_squared_error", y)
    if not isinstance(target, Blocked) or target.shape != y.shape:
        raise ValueError(
            f"mean_squared_error: expected a target of shape {y.shape}, got "
            f"{getattr(target, 'shape', target)}"
        )
    refuse_gpu("mean_squared_error", y, target)
    batch = y.batch
    scale = 1.0 / float(np.prod(y.shape))
    error = y.lanes - target.lanes

    def vjp(dy, needs):
        d = zero_unused(error * y.dtype.type(2 * scale * float(dy)), batch)
        return (y.like(d) if needs[0] else None, y.like(-d) if needs[1] else None)

    counter = Counter(batch.tree)
    for block, valid in zip(error, batch.counts(), strict=True):
        values = np.ascontiguousarray(block[..., :valid]).ravel()
        counter.push(np.array(np.square(values).sum(dtype=np.float64)))
    return counter.partial((), np.float64) * scale, vjp


def correct_count(logits, labels):
    """How many images' largest score is their label's: a Partial. Not differentiable.

    logits: (N, K); labels: (N,). Among equal scores the first class counts.
    """
    logits = value_of(logits)
    check_labels("correct_count", labels, logits.shape[1])
    batch = logits.batch
    return backends.of(logits).correct_count(logits.lanes, labels.lanes, batch.counts(), batch.tree)
