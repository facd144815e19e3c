"""Base classes of values: the operators + - * / **, and arrays in the memory of a device."""

# The ops are imported late, so mypy does not know what they return.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from typing import Self

# The storage of bfloat16 numbers. NumPy cannot compute with these items, so no one does by mistake.
BF16 = np.dtype("V2")

Other_contra = TypeVar("Other_contra", contravariant=True)  # type of the other operand


@functools.cache
def arithmetic() -> Any:
    """Import the ops at the first use of an operator; the core itself does not need them."""
    return importlib.import_module("mpidl.ops.arithmetic")


class Operators(Generic[Other_contra]):
    """Base class of values with operators. If one operand is a Var, Python uses Var's operators."""

    __slots__ = ()
    __array_ufunc__ = None  # makes array + value call value.__radd__

    def __add__(self, other: Other_contra) -> Self:
        return arithmetic().add(self, other)

    def __radd__(self, other: Other_contra) -> Self:
        return arithmetic().add(other, self)

    def __sub__(self, other: Other_contra) -> Self:
        return arithmetic().subtract(self, other)

    def __rsub__(self, other: Other_contra) -> Self:
        return arithmetic().subtract(other, self)

    def __mul__(self, other: Other_contra) -> Self:
        return arithmetic().multiply(self, other)

    def __rmul__(self, other: Other_contra) -> Self:
        return arithmetic().multiply(other, self)

    def __truediv__(self, other: Other_contra) -> Self:
        return arithmetic().divide(self, other)

    def __rtruediv__(self, other: Other_contra) -> Self:
        return arithmetic().divide(other, self)

    def __pow__(self, exponent: float) -> Self:
        return arithmetic().power(self, exponent)

    def __neg__(self) -> Self:
        return arithmetic().negative(self)


class OnDevice:
    """Base class of values in the memory of a device: arrays, and nodes of a tree."""

    __slots__ = ()


class DeviceArray(OnDevice):
    """Base class of arrays in the memory of a device; np.asarray copies one to the host."""

    __slots__ = ()

    shape: tuple[int, ...]
    dtype: np.dtype

    def zeros_like(self) -> DeviceArray:
        """Return zeros with the same shape and dtype, on the same device."""
        raise TypeError(f"{type(self).__name__} does not define zeros_like")


def is_device_array(value: Any) -> bool:
    """Return whether a value is an array in the memory of a device."""
    return isinstance(value, DeviceArray)


def as_type(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return an array in a dtype. The backends convert from and to `BF16`."""
    if array.dtype == dtype:
        return array
    if BF16 in (array.dtype, dtype):
        return importlib.import_module("mpidl.backends").converted(array, dtype)
    return array.astype(dtype)


def zeros_like(array: Any) -> Any:
    """Return zeros with the shape and dtype of an array, on the same device."""
    return array.zeros_like() if is_device_array(array) else np.zeros_like(array)
