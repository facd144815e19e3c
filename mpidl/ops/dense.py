"""The flatten and dense (fully connected) ops and their gradients."""

from __future__ import annotations

import math
from typing import Any

from mpidl import backends
from mpidl.backends.deferred import DeferredActivation, GradientWithSums
from mpidl.core.blocks import LANES, Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Array, Needs
from mpidl.ops import check

__all__ = ["dense", "flatten"]


@op(blocks=True)
def flatten(x: Blocked) -> WithVjp[Blocked]:
    """Reshape images (N, C, H, W) to features (N, C*H*W), in the order C, H, W.

    Parameters
    ----------
    x : Blocked
        Images (N, C, H, W).

    Returns
    -------
    Blocked
        Features (N, C*H*W); a Var during differentiation.
    """
    check.images("flatten", x)
    shape = x.image_shape
    features = math.prod(shape)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        dx = dy.raw.reshape(len(dy.raw), *shape, LANES)
        sums = dy.sums if isinstance(dy, GradientWithSums) else None
        return (x.like(dx) if sums is None else GradientWithSums(dx, x.batch, sums),)

    if isinstance(x, DeferredActivation):  # the result stays deferred
        return x.reshape((features,)), vjp
    return x.like(x.raw.reshape(len(x.raw), features, LANES)), vjp


@op(blocks=True)
def dense(x: Blocked, weight: Array, bias: Array | None) -> WithVjp[Blocked]:
    """Return x @ weight.T + bias.

    Parameters
    ----------
    x
        Inputs, (N, F).
    weight
        Weights, (K, F).
    bias
        Biases, (K,), or None.

    Returns
    -------
    Blocked
        Outputs, (N, K).
    """
    check.images("dense", x, 2)
    bias_shape = weight.shape[:1] if bias is None else bias.shape
    if len(weight.shape) != 2 or weight.shape[1] != x.shape[1] or bias_shape != weight.shape[:1]:
        raise ValueError(
            f"dense: expected weight (K, {x.shape[1]}) and bias (K,) for x {x.shape}, got weight "
            f"{weight.shape} and bias {bias_shape}"
        )
    backend = backends.of_value(x)
    y = backend.dense(x.source, weight, bias)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        dx, dweight, dbias, sums = backend.dense_backward(
            dy.lanes, x.source, weight, x.batch.tree, needs
        )
        if dx is not None:
            dx = x.like(dx) if sums is None else GradientWithSums(dx, x.batch, sums)
        return dx, dweight, dbias

    return x.like(y), vjp
