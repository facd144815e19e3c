"""An op for convolution, ReLU, cross-channel normalization and max pooling, as in AlexNet."""

from __future__ import annotations

from typing import Any

from mpidl import backends
from mpidl.backends.shapes import ChannelNorm, conv2d_shape
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Array, Needs
from mpidl.ops import check, pool
from mpidl.ops.conv import conv2d_geometry
from mpidl.ops.lrn import check_window


@op(blocks=True)
def conv2d_relu_norm_max_pool(
    x: Blocked,
    /,
    weight: Array,
    bias: Array | None,
    *,
    norm: tuple[int, float, float, float],
    windows: tuple[check.PairArgument, check.PairArgument | None, check.PaddingArgument],
    **options: Any,
) -> WithVjp[Blocked]:
    """Return max_pool2d(cross_channel_norm(relu(conv2d(x, weight, bias)))).

    The result has the same bytes as the result of separate ops. The op stores the output of the
    ReLU, but not the normalized pixels, which the backward pass does not need. The backend's
    attribute `fuses_convolutions` must be True.

    Parameters
    ----------
    x, weight, bias
        As in `conv2d`.
    norm
        The window, alpha, beta and k of `cross_channel_norm`.
    windows
        The size, stride and padding of `max_pool2d`.
    **options
        The stride, padding, dilation and groups of `conv2d`.

    Returns
    -------
    Blocked
        The result, (N, K, P, Q).
    """
    geometry = conv2d_geometry(x, weight, bias, **options)
    backend, batch = backends.of_value(x), x.batch
    shape = conv2d_shape(x.shape[1:], weight.shape, *geometry[:3])
    check_window("cross_channel_norm", *norm)
    places, _ = pool.windows("max_pool2d", shape, *windows, pool.PLACES)
    numbers = ChannelNorm(norm[0], *map(float, norm[1:]))
    y = backend.conv2d_relu(x.source, weight, bias, geometry, None)
    pooled, argmax = backend.norm_max_pool(y, numbers, places)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        dz = backend.norm_max_pool_relu_dx(dy.raw, argmax, y, numbers, places)
        dx, dweight, dbias, _ = backend.conv2d_backward(
            dz, x.source, weight, geometry, batch.counts(), batch.tree, needs
        )
        return None if dx is None else x.like(dx), dweight, dbias

    return x.like(pooled), vjp
