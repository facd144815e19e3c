"""The operators + - * / ** of Var and Blocked, which `ops.arithmetic` computes."""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def arithmetic() -> Any:
    """Import the ops at the first use of an operator; the core itself does not need them."""
    return importlib.import_module("mpidl.ops.arithmetic")


class Operators:
    """Base class of values with operators. If one operand is a Var, Python uses Var's operators."""

    __slots__ = ()
    __array_ufunc__ = None  # makes array + value call value.__radd__

    def __add__(self, other: Any) -> Any:
        return arithmetic().add(self, other)

    def __radd__(self, other: Any) -> Any:
        return arithmetic().add(other, self)

    def __sub__(self, other: Any) -> Any:
        return arithmetic().subtract(self, other)

    def __rsub__(self, other: Any) -> Any:
        return arithmetic().subtract(other, self)

    def __mul__(self, other: Any) -> Any:
        return arithmetic().multiply(self, other)

    def __rmul__(self, other: Any) -> Any:
        return arithmetic().multiply(other, self)

    def __truediv__(self, other: Any) -> Any:
        return arithmetic().divide(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return arithmetic().divide(other, self)

    def __pow__(self, exponent: float) -> Any:
        return arithmetic().power(self, exponent)

    def __neg__(self) -> Any:
        return arithmetic().negative(self)
