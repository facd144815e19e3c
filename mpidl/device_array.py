"""What tells arrays in device memory from NumPy arrays, without loading the code of any device."""

from __future__ import annotations

from typing import Any

import numpy as np


class OnDevice:
    """Base class of values that lie in the memory of a device: arrays, and nodes of sums."""

    __slots__ = ()


class DeviceArray(OnDevice):
    """Base class of arrays that lie in the memory of a device.

    `backends.of_array` returns the backend whose functions take such an array. It has `shape`,
    `dtype` and `zeros_like()`, and np.asarray copies it to the host.
    """

    __slots__ = ()

    shape: tuple[int, ...]
    dtype: np.dtype

    def zeros_like(self) -> DeviceArray:
        """Return zeros of this shape and type, on the same device."""
        raise TypeError(f"{type(self).__name__} does not say how it makes zeros")


def is_device_array(value: Any) -> bool:
    """Return whether a value lies in the memory of a device."""
    return isinstance(value, DeviceArray)
