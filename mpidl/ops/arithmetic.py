"""Elementwise arithmetic, and what makes + - * / ** work on values that are differentiated.

Written as a user would write an op: plain arrays, one block at a time. Shapes broadcast as in
NumPy, where a blocked value counts its images first: (N, C, H, W) * (C, 1, 1).
"""

from typing import Any

import numpy as np

from mpidl import backends
from mpidl.autodiff.tape import Var, op, value_of
from mpidl.blocks import Blocked, readable
from mpidl.fold import Partial
from mpidl.ops.loss import multiply_partial


def _like(dy, x):
    """Sum a cotangent over the axes along which x was broadcast."""
    extra = np.ndim(dy) - np.ndim(x)
    dy = dy.sum(axis=tuple(range(extra))) if extra else dy
    stretched = tuple(i for i, n in enumerate(np.shape(x)) if n == 1 and dy.shape[i] != 1)
    return dy.sum(axis=stretched, keepdims=True) if stretched else dy


@op(blocks=True)
def _add_blocked(a, b):
    if a.dtype != b.dtype:
        return a.like(a.lanes + b.lanes), lambda dy, needs: (dy, dy)
    sources = readable(a), readable(b)
    return a.like(backends.of(a).add(*sources)), lambda dy, needs: (dy, dy)


@op(blocks=True)
def _add_partial(a, b):
    if not isinstance(a, Partial):
        return b + a, lambda dy, needs: (_like(dy, a), dy)
    return a + b, lambda dy, needs: (dy, dy if isinstance(b, Partial) else _like(dy, b))


@op
def _add(a, b):
    return a + b, lambda dy: (_like(dy, a), _like(dy, b))


@op
def _multiply(a, b):
    return a * b, lambda dy: (_like(dy * b, a), _like(dy * a, b))


def add(a, b):
    """a + b. Two Partials stay apart until they are folded; a replicated addend counts once."""
    x, y = value_of(a), value_of(b)
    if isinstance(x, Partial) or isinstance(y, Partial):
        return _add_partial(a, b)
    both = isinstance(x, Blocked) and isinstance(y, Blocked)
    if both and x.shape == y.shape and x.batch is y.batch:
        return _add_blocked(a, b)
    return _add(a, b)


def multiply(a, b):
    """a * b, elementwise. A Partial can be multiplied by a number that is replicated."""
    if isinstance(value_of(a), Partial):
        return multiply_partial(a, b)
    if isinstance(value_of(b), Partial):
        return multiply_partial(b, a)
    return _multiply(a, b)


def negative(a):
    """-a."""
    return multiply(a, -1.0)


def subtract(a, b):
    """a - b."""
    return add(a, negative(b))


@op
def _divide(a, b):
    return a / b, lambda dy: (_like(dy / b, a), _like(-dy * a / (b * b), b))


def divide(a, b):
    """a / b, elementwise. A Partial can be divided by a number that is replicated."""
    if isinstance(value_of(a), Partial):
        return multiply_partial(a, _divide(1.0, b))
    return _divide(a, b)


@op
def power(a, exponent):
    """a ** exponent for a fixed number `exponent`."""
    return a**exponent, lambda dy: (dy * exponent * a ** (exponent - 1), None)


@op
def exp(a):
    """e ** a, elementwise."""
    y = np.exp(a)
    return y, lambda dy: (dy * y,)


@op
def log(a):
    """Natural logarithm, elementwise."""
    return np.log(a), lambda dy: (dy / a,)


@op
def sqrt(a):
    """Square root, elementwise."""
    y = np.sqrt(a)
    return y, lambda dy: (dy / (2 * y),)


@op
def _total(a, axis):
    def vjp(dy):
        dy = dy if axis is None else np.expand_dims(dy, axis)
        return (np.broadcast_to(dy, a.shape).astype(a.dtype), None)

    return a.sum(axis=axis), vjp


def total(a, axis=None):
    """The sum of a replicated array's elements, over `axis` or all: sum(w**2) of a penalty, say.

    (`sum` is the sum over the images of the mini-batch.)
    """
    if isinstance(value_of(a), (Blocked, Partial)):
        raise TypeError("total sums a replicated array; dl.sum and dl.mean go over the images")
    return _total(a, axis)


@op
def _transpose(a, axes):
    back = None if axes is None else tuple(np.argsort(axes))
    return np.ascontiguousarray(a.transpose(axes)), lambda dy: (dy.transpose(back), None)


def transpose(a, axes=None):
    """A replicated array with its axes permuted (reversed by default)."""
    return _transpose(a, axes)


@op
def _reshape(a, shape):
    return a.reshape(shape), lambda dy: (dy.reshape(a.shape), None)


def reshape(a, shape):
    """A replicated array in another shape."""
    return _reshape(a, shape)


_kind: Any
for _kind in (Var, Blocked):
    _kind.__add__ = add
    _kind.__radd__ = lambda a, b: add(b, a)
    _kind.__sub__ = subtract
    _kind.__rsub__ = lambda a, b: subtract(b, a)
    _kind.__mul__ = multiply
    _kind.__rmul__ = lambda a, b: multiply(b, a)
    _kind.__truediv__ = divide
    _kind.__rtruediv__ = lambda a, b: divide(b, a)
    _kind.__pow__ = power
    _kind.__neg__ = negative
    _kind.__array_ufunc__ = None  # so that array + value asks the value, not NumPy
