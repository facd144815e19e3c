"""The activation functions and their gradients."""

from __future__ import annotations

import math
from typing import Any, Literal

from mpidl import backends
from mpidl.autodiff.tape import WithVjp, op
from mpidl.blocks import Blocked
from mpidl.ops import check

__all__ = ["gelu", "leaky_relu", "relu", "sigmoid", "softmax", "tanh"]


@op(blocks=True)
def relu(x: Blocked) -> WithVjp[Blocked]:
    """Return max(x, 0), elementwise. The gradient at 0 is 0."""
    check.images("relu", x)
    backend = backends.of(x)
    y = backend.relu(x.lanes)
    return x.like(y), lambda dy, needs: (x.like(backend.relu_dx(dy.lanes, y)),)


def check_scale(name: str, scale: Any) -> None:
    """Raise a ValueError unless `scale` is a finite number >= 0, as `leaky_relu` requires."""
    if not (isinstance(scale, (int, float)) and 0 <= scale < math.inf):
        raise ValueError(f"{name}: scale must be a number >= 0, got {scale!r}")


@op(blocks=True)
def leaky_relu(x: Blocked, scale: float = 0.01) -> WithVjp[Blocked]:
    """Return x where x > 0 and scale * x elsewhere, elementwise.

    Parameters
    ----------
    x
        The input, of any shape (N, ...).
    scale
        A number >= 0. The derivative at 0 is `scale`.
    """
    check.images("leaky_relu", x)
    check_scale("leaky_relu", scale)
    backend = backends.of(x)
    y = backend.leaky_relu(x.lanes, scale)

    def vjp(dy, needs):
        return (x.like(backend.leaky_relu_dx(dy.lanes, y, scale)), None)[: len(needs)]

    return x.like(y), vjp


@op(blocks=True)
def tanh(x: Blocked) -> WithVjp[Blocked]:
    """Return the hyperbolic tangent, elementwise."""
    check.images("tanh", x)
    backend = backends.of(x)
    y = backend.tanh(x.lanes)
    return x.like(y), lambda dy, needs: (x.like(backend.tanh_dx(dy.lanes, y)),)


@op(blocks=True)
def sigmoid(x: Blocked) -> WithVjp[Blocked]:
    """Return 1 / (1 + exp(-x)), elementwise."""
    check.images("sigmoid", x)
    backend = backends.of(x)
    y = backend.sigmoid(x.lanes)
    return x.like(y), lambda dy, needs: (x.like(backend.sigmoid_dx(dy.lanes, y)),)


def check_approximate(name: str, approximate: Any) -> None:
    """Raise a ValueError unless `approximate` is "none" or "tanh", as `gelu` requires."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"{name}: approximate must be 'none' or 'tanh', got {approximate!r}")


@op(blocks=True)
def gelu(x: Blocked, approximate: Literal["none", "tanh"] = "none") -> WithVjp[Blocked]:
    """Return the Gaussian error linear unit, x * Phi(x), elementwise.

    Phi is the distribution function of the standard normal distribution.

    Parameters
    ----------
    x
        The input, of any shape (N, ...).
    approximate
        "none": Phi(x) = erfc(-x / sqrt(2)) / 2. "tanh": the approximation
        (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2.

    Returns
    -------
    Blocked
        The result, with the shape and dtype of x. The result for x = -inf is -0.

    Raises
    ------
    ValueError
        If `approximate` is neither "none" nor "tanh".

    Notes
    -----
    Hendrycks and Gimpel, "Gaussian error linear units (GELUs)", 2016, arXiv:1606.08415. PyTorch
    and MATLAB use the same names for the approximations. GELU is not monotonic, so the backward
    pass needs x; y is not enough.
    """
    check.images("gelu", x)
    check_approximate("gelu", approximate)
    backend, lanes = backends.of(x), x.lanes
    y = backend.gelu(lanes, approximate)

    def vjp(dy, needs):
        return (x.like(backend.gelu_dx(dy.lanes, lanes, approximate)), None)[: len(needs)]

    return x.like(y), vjp


@op(blocks=True)
def softmax(x: Blocked) -> WithVjp[Blocked]:
    """Return exp(x) / sum(exp(x)), the softmax over the K classes of each image or pixel.

    Parameters
    ----------
    x
        (N, K) or (N, K, ...).

    Returns
    -------
    Blocked
        The probabilities, with the shape and dtype of x.
    """
    check.images("softmax", x)
    if len(x.shape) < 2:
        raise ValueError(f"softmax: expected (N, K) or (N, K, ...), got {x.shape}")
    backend = backends.of(x)
    p = backend.softmax(x.lanes)
    return x.like(p.astype(x.dtype)), lambda dy, needs: (x.like(backend.softmax_dx(dy.lanes, p)),)
