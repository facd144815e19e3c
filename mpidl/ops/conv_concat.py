"""An op for the concatenation of two values, convolution and ReLU, as in decoders of a U-Net."""

from __future__ import annotations

from typing import Any

from mpidl import backends
from mpidl.backends.deferred import in_one_type
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Array, Needs
from mpidl.ops.concat import check_operands
from mpidl.ops.conv import geometry_for


@op(blocks=True)
def conv2d_concat_relu(
    first: Blocked,
    second: Blocked,
    /,
    weight: Array,
    bias: Array | None,
    **options: Any,
) -> WithVjp[Blocked]:
    """Return relu(conv2d(concat(first, second), weight, bias)), with the bytes of separate ops.

    On CPUs, the concatenated value is not stored: the convolution copies its input in parts, and
    takes each channel from one of the two values. The backend's attribute `fuses_convolutions` must
    be True.

    Parameters
    ----------
    first, second
        As in `concat`.
    weight, bias
        As in `conv2d`.
    **options
        The stride, padding, dilation and groups of `conv2d`.

    Returns
    -------
    Blocked
        The result, (N, K, P, Q).
    """
    values = check_operands([first, second])
    channels = [value.image_shape[0] for value in values]
    image_shape = sum(channels), *first.image_shape[1:]
    geometry = geometry_for(image_shape, weight, bias, **options)
    backend, batch = backends.of_value(first), first.batch
    parts = in_one_type(values)
    y = backend.conv2d_concat_relu(parts[0], parts[1], weight, bias, geometry)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        dx, dweight, dbias, _ = backend.conv2d_backward(
            dy.raw,
            backend.concat(parts),
            weight,
            geometry,
            batch.counts(),
            batch.tree,
            (needs[0] or needs[1], *needs[2:4]),
            activation_after=(y,),
        )
        if dx is None:
            return None, None, dweight, dbias
        return *(first.like(part) for part in backend.split(dx, channels)), dweight, dbias

    return first.like(y), vjp
