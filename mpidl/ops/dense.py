"""Fully connected layers."""

from mpidl import backends
from mpidl.ops import check
from mpidl.tape import op


@op(blocks=True)
def flatten(x):
    """(N, C, H, W) -> (N, C*H*W), in that order."""
    check.images("flatten", x)
    shape = x.lanes.shape

    def vjp(dy, needs):
        return (x.like(dy.lanes.reshape(shape)),)

    features = 1
    for size in x.image_shape:
        features *= size
    return x.like(x.lanes.reshape(shape[0], features, shape[-1])), vjp


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
    y = backend.dense(x.lanes, weight, bias)

    def vjp(dy, needs):
        tree = x.batch.tree
        return (
            x.like(backend.dense_dx(dy.lanes, weight)) if needs[0] else None,
            backend.dense_dweight(dy.lanes, x.lanes, tree) if needs[1] else None,
            backend.channel_sums(dy.lanes, tree) if needs[2] else None,
        )

    return x.like(y), vjp
