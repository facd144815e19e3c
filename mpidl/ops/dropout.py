"""Dropout."""

from __future__ import annotations

import hashlib
from typing import Any

from mpidl import backends
from mpidl.autodiff.tape import WithVjp, op
from mpidl.backends.reference.dropout import CHANCES
from mpidl.blocks import Blocked
from mpidl.ops import check

__all__ = ["dropout"]


def dropout_threshold(name: str, probability: Any) -> int:
    """Return in how many of 65536 cases an element is dropped.

    Raises
    ------
    ValueError
        Unless the probability is at least 0 and below 1.
    """
    if not (isinstance(probability, (int, float)) and 0 <= probability < 1):
        raise ValueError(f"{name}: probability must be at least 0 and below 1, got {probability!r}")
    return min(round(probability * CHANCES), CHANCES - 1)


def key_of(seed: int, purpose: str) -> tuple[int, ...]:
    """Return two 32-bit words for a seed and a text."""
    digest = hashlib.sha256(f"{int(seed)}\0dropout {purpose}".encode()).digest()
    return tuple(int.from_bytes(digest[i : i + 4], "little") for i in (0, 4))


@op(blocks=True)
def dropout(x: Blocked, probability: float = 0.5, *, key: str = "dropout") -> WithVjp[Blocked]:
    """Set each element to 0 with a probability, and divide the others by (1 - probability).

    Parameters
    ----------
    x
        Blocked.
    probability
        At least 0 and below 1. It is rounded to a multiple of 2**-16, and the scale fits the
        rounded number.
    key
        A text that distinguishes uses; in a network, the name of the layer.

    Notes
    -----
    Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", 2014.
    Training scales the elements, so prediction does nothing. The dropped elements depend on (seed
    and epoch of the mini-batch, key, sample number, element) alone, through Philox4x32-10
    (`reference.dropout.chances`). They are the same on any number of ranks, and the gradient
    computes them again instead of storing them.
    """
    check.images("dropout", x)
    threshold = dropout_threshold("dropout", probability)
    backend, batch = backends.of(x), x.batch
    dropout_args = threshold, CHANCES / (CHANCES - threshold), key_of(batch.seed, key)

    def apply(lanes):
        return backend.dropout(lanes, *dropout_args, *batch.samples())

    def vjp(dy, needs):
        return (x.like(apply(dy.lanes)), None)[: len(needs)]

    return x.like(apply(x.lanes)), vjp
