"""Ops for sums and means over the images of a mini-batch, and over axes of each image's array.

A Partial is a sum whose terms are not yet added up over the ranks.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from mpidl import backends
from mpidl.core.blocks import Blocked, zero_unused
from mpidl.core.fold import Partial
from mpidl.core.op import WithVjp, op, refuse_gpu
from mpidl.core.tape import Array, Needs, Var, value_of
from mpidl.ops import check

__all__ = ["mean", "sum"]

Axes: TypeAlias = int | tuple[int, ...]


@op(blocks=True)
def _image_sum(x: Blocked) -> WithVjp[Partial]:
    """Return the sum over the images of the global mini-batch, in float64."""
    batch = x.batch

    def vjp(dy: Any, needs: Needs) -> tuple[Any, ...]:
        lanes = np.empty_like(x.lanes)
        lanes[...] = np.asarray(dy, x.dtype)[..., None]
        return (x.like(zero_unused(lanes, batch)),)

    return backends.of_value(x).image_sums(x.lanes, batch.counts(), batch.tree), vjp


@op
def _entry_sum(
    x: np.ndarray, *, axes: tuple[int, ...], keepdims: bool, divisor: int
) -> WithVjp[np.ndarray]:
    """Return the sum over axes of each image's array, divided by a constant.

    Floats are summed in float64. Blocks always have the same memory layout, so the order of
    additions is fixed.
    """
    dtype = np.float64 if x.dtype.kind == "f" else None
    y = x.sum(axis=axes, dtype=dtype, keepdims=keepdims)
    y = y if divisor == 1 else y / divisor  # a sum of integers stays an integer

    def vjp(dy: np.ndarray) -> tuple[Any, ...]:
        dy = dy if keepdims else np.expand_dims(dy, axes)
        return (np.broadcast_to(dy / divisor, x.shape).astype(x.dtype),)

    return y.astype(x.dtype if x.dtype.kind == "f" else y.dtype), vjp


@op(blocks=True)
def multiply_partial(x: Partial, factor: Array | float) -> WithVjp[Partial]:
    """Multiply a Partial by a scalar that is the same on all ranks.

    Only a Partial of a single number can be differentiated with respect to the scalar.
    """
    value = float(np.asarray(factor))

    def vjp(dy: Any, needs: Needs) -> tuple[Any, ...]:
        dfactor = x * float(dy) if needs[1] and x.shape == () else None
        if needs[1] and dfactor is None:
            raise TypeError(
                "the factor of a Partial can be differentiated only if it is a single number"
            )
        return (dy * value if needs[0] else None, dfactor)

    return x * value, vjp


@overload
def sum(x: Var, axis: Axes = 0, *, keepdims: bool = False) -> Var: ...
@overload
def sum(x: Blocked, axis: Literal[0] = 0, *, keepdims: bool = False) -> Partial: ...
@overload
def sum(x: Blocked, axis: Axes, *, keepdims: bool = False) -> Partial | Blocked: ...
def sum(x: Blocked | Var, axis: Axes = 0, *, keepdims: bool = False) -> Partial | Blocked | Var:
    """Return the sum over axes. Axis 0 runs over the images of the global mini-batch.

    Parameters
    ----------
    x
        One element per image, (N,), or one array per image, (N, ...).
    axis
        The axis or axes to sum over; negative numbers count from the last axis. The default is the
        image axis.
    keepdims
        Whether to keep the summed axes with size 1. The image axis cannot be kept.

    Returns
    -------
    Partial or Blocked
        If `axis` contains 0, a Partial in float64. Otherwise, a Blocked value in the dtype of x.
        For x of shape (N, C, H, W), the result has the shape (C, H, W) by default, () for
        axis=(0, 1, 2, 3), and (N, C) for axis=(2, 3).

    Raises
    ------
    TypeError
        If x is not a value per image, or is on a GPU.
    ValueError
        If an axis does not exist or is repeated, or if `keepdims` is set for axis 0.
    """
    return _reduce("sum", x, axis, keepdims)


@overload
def mean(x: Var, axis: Axes = 0, *, keepdims: bool = False) -> Var: ...
@overload
def mean(x: Blocked, axis: Literal[0] = 0, *, keepdims: bool = False) -> Partial: ...
@overload
def mean(x: Blocked, axis: Axes, *, keepdims: bool = False) -> Partial | Blocked: ...
def mean(x: Blocked | Var, axis: Axes = 0, *, keepdims: bool = False) -> Partial | Blocked | Var:
    """Return the mean over axes. Axis 0 runs over the images of the global mini-batch.

    A mean over images includes the images of all ranks. `mean` raises the same errors as `sum`.

    Parameters
    ----------
    x
        One element per image, (N,), or one array per image, (N, ...).
    axis
        The axis or axes to average over, as in `sum`.
    keepdims
        Whether to keep the averaged axes with size 1. The image axis cannot be kept.

    Returns
    -------
    Partial, Blocked or Var
        The mean, with the kind and shape that `sum` returns.
    """
    return _reduce("mean", x, axis, keepdims)


def _reduce(name: str, x: Blocked | Var, axis: Axes, keepdims: bool) -> Partial | Blocked | Var:
    value = value_of(x)
    check.images(name, value)
    refuse_gpu(name, value)
    axes = _checked_axes(name, axis, value.shape)
    entry_axes = tuple(i for i in axes if i)
    if keepdims and 0 in axes:
        raise ValueError(
            f"{name}: keepdims: expected axes without 0, the axis of images, got {axis}"
        )
    if entry_axes:
        divisor = math.prod(value.shape[i] for i in entry_axes) if name == "mean" else 1
        x = _entry_sum(x, axes=entry_axes, keepdims=keepdims, divisor=divisor)
    if 0 not in axes:
        return x
    total = _image_sum(x)
    return multiply_partial(total, 1.0 / value.shape[0]) if name == "mean" else total


def _checked_axes(name: str, axis: Axes, shape: tuple[int, ...]) -> list[int]:
    """Return the axes as a sorted list of numbers >= 0, or raise ValueError if they are invalid."""
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    integers = all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in axes)
    if not integers or not axes or not all(-len(shape) <= i < len(shape) for i in axes):
        raise ValueError(
            f"{name}: expected axes from 0 to {len(shape) - 1} of a value of shape {shape}, "
            f"got {axis}"
        )
    positive = sorted(int(i) % len(shape) for i in axes)
    if len(set(positive)) < len(positive):
        raise ValueError(f"{name}: expected each axis once, got {axis}")
    return positive
