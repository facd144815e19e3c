"""The op that concatenates values along the channels, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidl import backends
from mpidl.backends.deferred import in_one_type
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Needs, Var
from mpidl.ops import check

__all__ = ["concat"]


@op(blocks=True)
def concat(*values: Blocked | Var) -> WithVjp[Blocked]:
    """Concatenate values of the same mini-batch along the channels.

    Parameters
    ----------
    values
        Values of shapes (N, C1, ...), (N, C2, ...), ... All values must have the same dtype and the
        same axes after the channels.

    Returns
    -------
    Blocked
        The concatenated value, (N, C1 + C2 + ..., ...).

    Raises
    ------
    ValueError
        If the dtypes, the axes after the channels or the mini-batches differ.
    """
    blocked = check_operands(values)
    first = blocked[0]
    backend = backends.of_value(first)
    channels = [v.image_shape[0] for v in blocked]

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        return tuple(first.like(part) for part in backend.split(dy.raw, channels))

    return first.like(backend.concat(in_one_type(blocked))), vjp


def check_operands(values: Sequence[Blocked | Var]) -> list[Blocked]:
    """Return the operands of `concat`. Raises TypeError or ValueError if they are invalid."""
    blocked = [check.images("concat", value) for value in values]
    first = blocked[0]
    if any(v.batch is not first.batch for v in blocked):
        raise ValueError("concat: its arguments belong to different mini-batches")
    if any(v.image_shape[1:] != first.image_shape[1:] or v.dtype != first.dtype for v in blocked):
        raise ValueError(
            "concat: expected values of one type that differ only in their channels, got "
            + ", ".join(f"{v.shape} {v.dtype}" for v in blocked)
        )
    return blocked
