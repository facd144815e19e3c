"""Elementwise arithmetic ops, which the operators + - * / ** of Var and Blocked values call.

Most of these ops work on plain arrays, one block of 16 images at a time, like custom ops. Shapes
broadcast as in NumPy. The first axis of a blocked value is the image axis. For example, a blocked
value (N, C, H, W) times an array (C, 1, 1) scales each channel. A replicated value is an array with
the same bytes on all ranks. A Partial is a sum whose terms are not yet added up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, overload

import numpy as np

from mpidl import backends
from mpidl.backends.deferred import addend, in_one_type
from mpidl.core.blocks import Blocked
from mpidl.core.fold import Partial
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Operand, Var, value_of
from mpidl.docstrings import with_sections
from mpidl.ops import gates
from mpidl.ops.reductions import multiply_partial

__all__ = [
    "add",
    "divide",
    "exp",
    "log",
    "multiply",
    "negative",
    "power",
    "reshape",
    "sqrt",
    "subtract",
    "total",
    "transpose",
]
Term = TypeVar("Term", Blocked, Partial, np.ndarray)
Replicated = TypeVar("Replicated", bound=Var | np.ndarray)


class Elementwise(Protocol):
    """Type of a function of two values. One value may be a replicated array or a scalar."""

    __name__: str

    @overload
    def __call__(self, a: Var, b: Operand, /) -> Var: ...
    @overload
    def __call__(self, a: Operand, b: Var, /) -> Var: ...
    @overload
    def __call__(self, a: Term, b: Term | np.ndarray | float, /) -> Term: ...
    @overload
    def __call__(self, a: np.ndarray | float, b: Term, /) -> Term: ...


def elementwise(function: Callable[[Any, Any], Any]) -> Elementwise:
    """Document the operands. For type checkers, the function's type is `Elementwise`."""
    return with_sections("""
        Parameters
        ----------
        a, b : number, array, Blocked, Partial or Var
            The operands, whose shapes must broadcast.

        Returns
        -------
        array, Blocked, Partial or Var
            The result, of the operands' kind; a Var during differentiation.
        """)(function)


of_each_element = with_sections("""
    Parameters
    ----------
    a : array, Blocked or Var
        The input, of any shape.

    Returns
    -------
    array, Blocked or Var
        The result, with the kind and shape of the input.
    """)


def _sum_to(dy: Any, x: Any) -> Any:
    """Sum a cotangent over the axes along which x was broadcast; return the sum, shaped like x."""
    extra = np.ndim(dy) - np.ndim(x)
    dy = dy.sum(axis=tuple(range(extra))) if extra else dy
    stretched = tuple(i for i, n in enumerate(np.shape(x)) if n == 1 and dy.shape[i] != 1)
    return dy.sum(axis=stretched, keepdims=True) if stretched else dy


@op(blocks=True)
def _add_blocked(a: Blocked, b: Blocked) -> WithVjp[Blocked]:
    if a.dtype != b.dtype:
        return a.like(a.lanes + b.lanes), lambda dy, needs: (dy, dy)
    operands = in_one_type((a, b), addend)
    return a.like(backends.of_value(a).add(*operands)), lambda dy, needs: (dy, dy)


@op(blocks=True)
def _add_partial(a: Any, b: Any) -> WithVjp[Partial]:
    if not isinstance(a, Partial):
        return b + a, lambda dy, needs: (_sum_to(dy, a), dy)
    return a + b, lambda dy, needs: (dy, dy if isinstance(b, Partial) else _sum_to(dy, b))


@op
def _add(a: Any, b: Any) -> WithVjp[np.ndarray]:
    return a + b, lambda dy: (_sum_to(dy, a), _sum_to(dy, b))


@op
def _multiply(a: Any, b: Any) -> WithVjp[np.ndarray]:
    return a * b, lambda dy: (_sum_to(dy * b, a), _sum_to(dy * a, b))


@elementwise
def add(a: Any, b: Any) -> Any:
    """Return a + b.

    If both operands are Partials, the result keeps their terms separate until it is summed over the
    ranks. A replicated value is added to a Partial once, not once per rank.
    """
    x, y = value_of(a), value_of(b)
    if isinstance(x, Partial) or isinstance(y, Partial):
        return _add_partial(a, b)
    both = isinstance(x, Blocked) and isinstance(y, Blocked)
    if both and x.shape == y.shape and x.batch is y.batch:
        return _add_blocked(a, b)
    return _add(a, b)


@elementwise
def multiply(a: Any, b: Any) -> Any:
    """Return a * b, elementwise. A Partial can be multiplied by a replicated scalar.

    Features (N, C) times images (N, C, H, W) scale the channels of each image, like (N, C, 1, 1).
    """
    if isinstance(value_of(a), Partial):
        return multiply_partial(a, b)
    if isinstance(value_of(b), Partial):
        return multiply_partial(b, a)
    x, y = value_of(a), value_of(b)
    if gates.is_product(x, y):
        return gates.multiply_blocked(a, b)
    return _multiply(a, b)


@overload
def negative(a: Var) -> Var: ...
@overload
def negative(a: Term) -> Term: ...
def negative(a: Any) -> Any:
    """Return -a.

    Parameters
    ----------
    a : array, Blocked, Partial or Var
        The input, of any shape.

    Returns
    -------
    array, Blocked, Partial or Var
        The result, with the kind and shape of the input.
    """
    return multiply(a, -1.0)


@elementwise
def subtract(a: Any, b: Any) -> Any:
    """Return a - b."""
    return add(a, negative(b))


@op
def _divide(a: Any, b: Any) -> WithVjp[np.ndarray]:
    return a / b, lambda dy: (_sum_to(dy / b, a), _sum_to(-dy * a / (b * b), b))


@elementwise
def divide(a: Any, b: Any) -> Any:
    """Return a / b, elementwise. A Partial can be divided by a replicated scalar."""
    if isinstance(value_of(a), Partial):
        return multiply_partial(a, _divide(1.0, b))
    return _divide(a, b)


@op
def power(a: np.ndarray, exponent: float) -> WithVjp[np.ndarray]:
    """Return a ** exponent, elementwise, for a constant scalar `exponent`.

    Parameters
    ----------
    a : array, Blocked or Var
        The input, of any shape.
    exponent : float
        A constant, which cannot be differentiated.

    Returns
    -------
    array, Blocked or Var
        The result, with the kind and shape of the input.
    """
    return a**exponent, lambda dy: (dy * exponent * a ** (exponent - 1), None)


@of_each_element
@op
def exp(a: np.ndarray) -> WithVjp[np.ndarray]:
    """Return e ** a, elementwise."""
    y = np.exp(a)
    return y, lambda dy: (dy * y,)


@of_each_element
@op
def log(a: np.ndarray) -> WithVjp[np.ndarray]:
    """Return the natural logarithm of a, elementwise."""
    return np.log(a), lambda dy: (dy / a,)


@of_each_element
@op
def sqrt(a: np.ndarray) -> WithVjp[np.ndarray]:
    """Return the square root of a, elementwise."""
    y = np.sqrt(a)
    return y, lambda dy: (dy / (2 * y),)


@op
def _total(a: np.ndarray, axis: int | tuple[int, ...] | None) -> WithVjp[np.ndarray]:
    def vjp(dy: np.ndarray) -> tuple[Any, ...]:
        dy = dy if axis is None else np.expand_dims(dy, axis)
        return (np.broadcast_to(dy, a.shape).astype(a.dtype), None)

    return a.sum(axis=axis), vjp


def total(a: Replicated, axis: int | tuple[int, ...] | None = None) -> Replicated:
    """Return the sum of a replicated array's elements, such as the sum of w**2 for a penalty.

    To sum a value over the images of the mini-batch, use `sum`.

    Parameters
    ----------
    a
        A replicated array.
    axis
        The axis or axes to sum over; by default all axes.

    Returns
    -------
    array or Var
        The sum, without the axes that were summed over.

    Raises
    ------
    TypeError
        If `a` is a blocked value or a Partial.
    """
    if isinstance(value_of(a), (Blocked, Partial)):
        raise TypeError("total: expected a replicated array; dl.sum and dl.mean sum over images")
    return _total(a, axis)


@op
def _transpose(a: np.ndarray, axes: Sequence[int] | None) -> WithVjp[np.ndarray]:
    inverse = None if axes is None else tuple(np.argsort(axes))
    return np.ascontiguousarray(a.transpose(axes)), lambda dy: (dy.transpose(inverse), None)


def transpose(a: Replicated, axes: Sequence[int] | None = None) -> Replicated:
    """Permute the axes of a replicated array; by default, reverse their order.

    Parameters
    ----------
    a : array or Var
        A replicated array.
    axes : tuple of int, optional
        The new order of the axes.

    Returns
    -------
    array or Var
        The array with permuted axes.
    """
    return _transpose(a, axes)


@op
def _reshape(a: np.ndarray, shape: int | Sequence[int]) -> WithVjp[np.ndarray]:
    return a.reshape(shape), lambda dy: (dy.reshape(a.shape), None)


def reshape(a: Replicated, shape: int | Sequence[int]) -> Replicated:
    """Return a replicated array with another shape.

    Parameters
    ----------
    a : array or Var
        A replicated array.
    shape : int or tuple of int
        The new shape; one dimension may be -1.

    Returns
    -------
    array or Var
        The same elements in the new shape.
    """
    return _reshape(a, shape)
