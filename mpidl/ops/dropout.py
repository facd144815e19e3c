"""Dropout."""

import hashlib

from mpidl import backends
from mpidl.autodiff.tape import op
from mpidl.backends.reference.dropout import CHANCES
from mpidl.ops import check


def dropout_threshold(name, probability):
    """In how many of 65536 cases an element is dropped; ValueError where `probability` is none."""
    if not (isinstance(probability, (int, float)) and 0 <= probability < 1):
        raise ValueError(f"{name}: probability must be at least 0 and below 1, got {probability!r}")
    return min(round(probability * CHANCES), CHANCES - 1)


def key_of(seed, purpose):
    """Two 32-bit words for a seed and a text."""
    digest = hashlib.sha256(f"{int(seed)}\0dropout {purpose}".encode()).digest()
    return tuple(int.from_bytes(digest[i : i + 4], "little") for i in (0, 4))


@op(blocks=True)
def dropout(x, probability=0.5, *, key="dropout"):
    """Each element becomes 0 with this probability, else x / (1 - probability).

    Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", 2014,
    with the scaling in training, so that prediction has nothing to do. What becomes 0 depends on
    (seed and epoch of the mini-batch, key, sample number, element) alone, through Philox4x32-10
    (`reference.dropout.chances`): it is the same on any number of ranks and is computed again for
    the gradient, not stored. `key` is a text that tells uses apart, the layer's name in a network.
    The probability is rounded to a multiple of 2**-16, and the scale fits that.
    """
    check.images("dropout", x)
    threshold = dropout_threshold("dropout", probability)
    backend, batch = backends.of(x), x.batch
    how = threshold, CHANCES / (CHANCES - threshold), key_of(batch.seed, key)

    def apply(lanes):
        return backend.dropout(lanes, *how, *batch.samples())

    def vjp(dy, needs):
        return (x.like(apply(dy.lanes)), None)[: len(needs)]

    return x.like(apply(x.lanes)), vjp
