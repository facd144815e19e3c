"""Fully connected layers."""

import math

from mpidl import backends
from mpidl.autodiff.tape import op
from mpidl.blocks import LANES, DeferredActivation, GradientWithSums
from mpidl.ops import check


@op(blocks=True)
def flatten(x):
    """(N, C, H, W) -> (N, C*H*W), in that order."""
    check.images("flatten", x)
    shape = x.image_shape
    features = math.prod(shape)

    def vjp(dy, needs):
        dx = dy.lanes.reshape(len(dy.lanes), *shape, LANES)
        return (
            GradientWithSums(dx, x.batch, dy.sums)
            if isinstance(dy, GradientWithSums)
            else x.like(dx),
        )

    if isinstance(x, DeferredActivation):  # which stays what is not stored
        return x.reshape((features,)), vjp
    return x.like(x.lanes.reshape(len(x.lanes), features, LANES)), vjp


@op(blocks=True)
def dense(x, weight, bias):
    """y = x @ weight.T + bias.

    x: (N, F); weight: (K, F); bias: (K,); returns (N, K).
    """
    check.images("dense", x, 2)
    if weight.ndim != 2 or weight.shape[1] != x.shape[1] or bias.shape != weight.shape[:1]:
        raise ValueError(
            f"dense: expected weight (K, {x.shape[1]}) and bias (K,) for x {x.shape}, got weight "
            f"{weight.shape} and bias {bias.shape}"
        )
    backend = backends.of(x)
    y = backend.dense(x.source, weight, bias)

    def vjp(dy, needs):
        dx, dweight, dbias, sums = backend.dense_backward(
            dy.lanes, x.source, weight, x.batch.tree, needs
        )
        if dx is not None:
            dx = x.like(dx) if sums is None else GradientWithSums(dx, x.batch, sums)
        return dx, dweight, dbias

    return x.like(y), vjp
