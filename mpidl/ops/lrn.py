"""The cross-channel (local response) normalization op and its gradient."""

from __future__ import annotations

from typing import Any

from mpidl import backends
from mpidl.backends.shapes import ChannelNorm
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Needs
from mpidl.ops import check

__all__ = ["cross_channel_norm"]


def check_window(name: str, window: Any, alpha: Any, beta: Any, k: Any) -> None:
    """Raise ValueError if the arguments of `cross_channel_norm` are invalid."""
    check.integer(name, "window", window)
    if not (check.are_numbers(alpha, beta, k) and alpha >= 0 and beta >= 0 and k > 0):
        raise ValueError(
            f"{name}: expected alpha >= 0, beta >= 0 and k > 0, got {alpha!r}, {beta!r} and {k!r}"
        )


@op(blocks=True)
def cross_channel_norm(
    x: Blocked, window: int, *, alpha: float = 1e-4, beta: float = 0.75, k: float = 2.0
) -> WithVjp[Blocked]:
    """Return x / (k + alpha / window * S)**beta, where S is the sum of x**2 over nearby channels.

    Parameters
    ----------
    x
        The input, (N, C, H, W) or (N, C).
    window
        Number of channels in the sum, an integer >= 1. For channel c, S is the sum over channels
        c - (window - 1) // 2 to c + window // 2. Channels that do not exist are left out.
    alpha, beta
        Factor of S and exponent in the formula, numbers >= 0.
    k
        Constant in the formula, a number > 0.

    Returns
    -------
    Blocked
        The result, with the shape of `x`; a Var during differentiation.

    Notes
    -----
    See Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural
    networks", 2012, section 3.3. The paper does not divide alpha by the window; this function does,
    as do MATLAB's crossChannelNormalizationLayer and PyTorch's LocalResponseNorm. For even windows,
    mpidl puts the extra channel after c, and PyTorch puts the extra channel before c.
    """
    check.images("cross_channel_norm", x)
    check_window("cross_channel_norm", window, alpha, beta, k)
    backend, norm = backends.of_value(x), ChannelNorm(window, float(alpha), float(beta), float(k))
    lanes = x.raw
    y = backend.cross_channel_norm(lanes, norm)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        dx = backend.cross_channel_norm_dx(dy.raw, lanes, norm)
        return (x.like(dx), None)[: len(needs)]

    return x.like(y), vjp
