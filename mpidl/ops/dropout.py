"""The dropout op and its gradient."""

from __future__ import annotations

import hashlib
from typing import Any

from mpidl import backends
from mpidl.backends.reference.dropout import CHANCES
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Needs
from mpidl.ops import check

__all__ = ["dropout"]


def dropout_threshold(name: str, probability: Any) -> int:
    """Return the dropout probability in units of 1/65536, rounded to an integer <= 65535.

    Raises
    ------
    ValueError
        If the probability is not a number in [0, 1).
    """
    if not (check.are_numbers(probability) and 0 <= probability < 1):
        raise ValueError(f"{name}: probability must be at least 0 and below 1, got {probability!r}")
    threshold: int = min(round(probability * CHANCES), CHANCES - 1)
    return threshold


def key_of(seed: int, purpose: str) -> tuple[int, ...]:
    """Hash a seed and a string into a Philox key of two 32-bit words."""
    digest = hashlib.sha256(f"{int(seed)}\0dropout {purpose}".encode()).digest()
    return tuple(int.from_bytes(digest[i : i + 4], "little") for i in (0, 4))


@op(blocks=True)
def dropout(
    x: Blocked, probability: float = 0.5, *, key: str = "dropout", whole_images: bool = False
) -> WithVjp[Blocked]:
    """Set each element to 0 with a given probability, and divide the rest by 1 - probability.

    Parameters
    ----------
    x
        The input, of any shape (N, ...).
    probability
        Probability of dropping an element, in [0, 1). The probability is rounded to a multiple of
        2**-16, and the division uses the rounded value.
    key
        A string that distinguishes the dropout ops of a model. In a network, the key is the name
        of the layer.
    whole_images
        Whether to drop either all elements of an image or none (stochastic depth).

    Returns
    -------
    Blocked
        The result, with the shape of `x`; a Var during differentiation.

    Notes
    -----
    Dropout is described in Srivastava et al., "Dropout: a simple way to prevent neural networks
    from overfitting", 2014, and stochastic depth in Huang et al., "Deep networks with stochastic
    depth", 2016, arXiv:1603.09382. Elements are scaled during training, so prediction leaves
    elements unchanged. The random generator Philox4x32-10 chooses the elements to drop
    (`reference.dropout.chances`). The choice depends only on the seed and epoch of the mini-batch,
    the key, the sample number and, unless `whole_images`, the position in the sample. The choice is
    therefore the same on any number of ranks, and the backward pass can compute it again instead
    of storing it.
    """
    check.images("dropout", x)
    threshold = dropout_threshold("dropout", probability)
    backend, batch = backends.of_value(x), x.batch
    dropout_args = threshold, CHANCES / (CHANCES - threshold), key_of(batch.seed, key)

    def apply(lanes: Any) -> Any:
        return backend.dropout(lanes, *dropout_args, *batch.samples(), whole_images)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        return (x.like(apply(dy.raw)), None)[: len(needs)]

    return x.like(apply(x.raw)), vjp
