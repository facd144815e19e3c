"""Base classes by which code recognizes arrays in device memory without importing GPU modules."""

from __future__ import annotations

from typing import Any

import numpy as np


class OnDevice:
    """Base class of values in the memory of a device, such as arrays and reduction-tree nodes."""

    __slots__ = ()


class DeviceArray(OnDevice):
    """Base class of arrays in the memory of a device.

    `backends.of_array` returns the backend whose functions accept the array. Subclasses define
    `shape`, `dtype` and `zeros_like()`. np.asarray copies the array to the host.
    """

    __slots__ = ()

    shape: tuple[int, ...]
    dtype: np.dtype

    def zeros_like(self) -> DeviceArray:
        """Return zeros with the same shape and dtype, on the same device."""
        raise TypeError(f"{type(self).__name__} does not define zeros_like")


def is_device_array(value: Any) -> bool:
    """Return whether a value is an array in the memory of a device."""
    return isinstance(value, DeviceArray)
