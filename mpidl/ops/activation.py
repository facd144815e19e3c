"""Activation functions and their gradients, as differentiable ops."""

from __future__ import annotations

import math
from typing import Any, Literal

from mpidl import backends
from mpidl.backends.deferred import DeferredNormalization
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Array, Needs
from mpidl.docstrings import with_sections
from mpidl.ops import check

__all__ = ["clip", "gelu", "hard_sigmoid", "hard_swish", "leaky_relu", "prelu"]
__all__ += ["relu", "sigmoid", "softmax", "swish", "tanh"]


def _elementwise(
    name: str, x: Blocked, *numbers: float, function: str | None = None, from_x: bool = False
) -> WithVjp[Blocked]:
    """Return the backend's `elementwise` function of x, and its vjp.

    `function` is the backend's name of the op `name`, if it is another one. The gradient is
    computed from x if `from_x`, else from the result.
    """
    check.images(name, x)
    backend, function = backends.of_value(x), function or name
    operand = x.deferred if isinstance(x, DeferredNormalization) else x.raw
    y = backend.elementwise(function, operand, *numbers)
    value = operand if from_x else y

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        dx = backend.elementwise_dx(function, dy.raw, value, *numbers)
        return x.like(dx), *(None for _ in needs[1:])

    return x.like(y), vjp


of_each_element = with_sections("""
    Parameters
    ----------
    x : Blocked
        The input, of any shape (N, ...).

    Returns
    -------
    Blocked
        The result, with the shape of `x`; a Var during differentiation.
    """)


@of_each_element
@op(blocks=True)
def relu(x: Blocked) -> WithVjp[Blocked]:
    """Return max(x, 0), elementwise. The gradient at 0 is 0."""
    check.images("relu", x)
    backend = backends.of_value(x)
    y = backend.relu(x.raw)
    return x.like(y), lambda dy, needs: (x.like(backend.relu_dx(dy.raw, y)),)


def check_scale(name: str, scale: Any) -> None:
    """Raise ValueError unless `scale` is a finite number >= 0, as `leaky_relu` requires."""
    if not (check.are_numbers(scale) and 0 <= scale < math.inf):
        raise ValueError(f"{name}: scale must be a number >= 0, got {scale!r}")


@op(blocks=True)
def leaky_relu(x: Blocked, scale: float = 0.01) -> WithVjp[Blocked]:
    """Return x where x > 0 and scale * x elsewhere, elementwise.

    Parameters
    ----------
    x
        The input, of any shape (N, ...).
    scale
        Slope for x <= 0, a number >= 0. The derivative at 0 is `scale`.

    Returns
    -------
    Blocked
        The result, with the shape of `x`; a Var during differentiation.
    """
    check_scale("leaky_relu", scale)
    return _elementwise("leaky_relu", x, scale)


@of_each_element
@op(blocks=True)
def tanh(x: Blocked) -> WithVjp[Blocked]:
    """Return the hyperbolic tangent, elementwise."""
    return _elementwise("tanh", x)


@of_each_element
@op(blocks=True)
def sigmoid(x: Blocked) -> WithVjp[Blocked]:
    """Return 1 / (1 + exp(-x)), elementwise."""
    return _elementwise("sigmoid", x)


def check_approximate(name: str, approximate: Any) -> None:
    """Raise ValueError unless `approximate` is "none" or "tanh", as `gelu` requires."""
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
        If "none", Phi(x) is erfc(-x / sqrt(2)) / 2. If "tanh", Phi(x) is approximated by
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
    See Hendrycks and Gimpel, "Gaussian error linear units (GELUs)", 2016, arXiv:1606.08415. PyTorch
    and MATLAB use the same names for the approximations. GELU is not monotonic, so the backward
    pass cannot compute the gradient from y and needs x.
    """
    check_approximate("gelu", approximate)
    function = "gelu" if approximate == "none" else "gelu_tanh"
    return _elementwise("gelu", x, function=function, from_x=True)


@of_each_element
@op(blocks=True)
def swish(x: Blocked) -> WithVjp[Blocked]:
    """Return x * sigmoid(x), elementwise. PyTorch calls this function SiLU.

    Notes
    -----
    See Ramachandran, Zoph and Le, "Searching for activation functions", 2017, arXiv:1710.05941.
    """
    return _elementwise("swish", x, from_x=True)


def check_range(name: str, low: Any, high: Any) -> None:
    """Raise ValueError unless `low` < `high` are numbers and at least one of them is finite."""
    numbers = check.are_numbers(low, high) and low < high
    if not numbers or (math.isinf(low) and math.isinf(high)):
        raise ValueError(
            f"{name}: expected numbers low < high, at least one of them finite, got {low!r} and "
            f"{high!r}"
        )


@op(blocks=True)
def clip(x: Blocked, low: float, high: float) -> WithVjp[Blocked]:
    """Return min(max(x, low), high), elementwise.

    Parameters
    ----------
    x
        The input, of any shape (N, ...).
    low, high
        Bounds of the range. One of them may be infinite. The derivative is 1 strictly inside the
        range and 0 elsewhere, as in PyTorch's hardtanh.

    Returns
    -------
    Blocked
        The result, with the shape of `x`; a Var during differentiation.

    Raises
    ------
    ValueError
        If low >= high, or if both bounds are infinite.
    """
    check_range("clip", low, high)
    return _elementwise("clip", x, low, high, function="clip_range")


def check_line(name: str, alpha: Any, beta: Any) -> None:
    """Raise ValueError unless `alpha` and `beta` are finite numbers, and alpha > 0."""
    numbers = check.are_numbers(alpha, beta)
    if not (numbers and 0 < alpha < math.inf and math.isfinite(beta)):
        raise ValueError(
            f"{name}: expected finite numbers alpha > 0 and beta, got {alpha!r} and {beta!r}"
        )


@op(blocks=True)
def hard_sigmoid(x: Blocked, alpha: float = 1 / 6, beta: float = 0.5) -> WithVjp[Blocked]:
    """Return min(max(alpha * x + beta, 0), 1), elementwise.

    Parameters
    ----------
    x
        The input, of any shape (N, ...).
    alpha, beta
        Slope (> 0) and offset of the line, with the same defaults as in PyTorch. The derivative is
        alpha where the result is strictly between 0 and 1, else 0.

    Returns
    -------
    Blocked
        The result, with the shape of `x`; a Var during differentiation.
    """
    check_line("hard_sigmoid", alpha, beta)
    return _elementwise("hard_sigmoid", x, alpha, beta)


@of_each_element
@op(blocks=True)
def hard_swish(x: Blocked) -> WithVjp[Blocked]:
    """Return x * hard_sigmoid(x), elementwise. The derivative is 0 at -3 and 1 at 3.

    Notes
    -----
    See Howard et al., "Searching for MobileNetV3", 2019, arXiv:1905.02244, section 5.2.
    """
    return _elementwise("hard_swish", x, from_x=True)


@op(blocks=True)
def prelu(x: Blocked, slope: Array) -> WithVjp[Blocked]:
    """Return x where x > 0 and slope * x elsewhere, with a learnable slope.

    Parameters
    ----------
    x
        The input, (N, C, ...).
    slope
        One slope per channel, (C,), or one slope for all channels, (1,). The derivative at 0 is the
        slope.

    Returns
    -------
    Blocked
        The result, with the shape of `x`; a Var during differentiation.

    Raises
    ------
    ValueError
        If `slope` has another shape.

    Notes
    -----
    See He, Zhang, Ren and Sun, "Delving deep into rectifiers", 2015, arXiv:1502.01852.
    """
    check.images("prelu", x)
    if slope.shape not in ((1,), x.shape[1:2]):
        raise ValueError(
            f"prelu: expected slopes (1,) or {x.shape[1:2]} for x {x.shape}, got {slope.shape}"
        )
    backend, lanes = backends.of_value(x), x.raw
    y = backend.prelu(lanes, slope)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        dx = x.like(backend.prelu_dx(dy.raw, lanes, slope)) if needs[0] else None
        if not needs[1]:
            return dx, None
        return dx, backend.prelu_dslope(dy.raw, lanes, len(slope), x.batch.tree)

    return x.like(y), vjp


@op(blocks=True)
def softmax(x: Blocked) -> WithVjp[Blocked]:
    """Return exp(x) / sum(exp(x)), the softmax over the K classes of each image or pixel.

    Parameters
    ----------
    x
        Scores, (N, K) or (N, K, ...).

    Returns
    -------
    Blocked
        The probabilities, with the shape and dtype of x.
    """
    check.images("softmax", x)
    if len(x.shape) < 2:
        raise ValueError(f"softmax: expected (N, K) or (N, K, ...), got {x.shape}")
    backend = backends.of_value(x)
    p = backend.softmax(x.lanes)
    return x.like(p.astype(x.dtype)), lambda dy, needs: (x.like(backend.softmax_dx(dy.lanes, p)),)
