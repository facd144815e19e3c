"""Base classes that tell values in device memory from those of the host, without GPU modules."""

from __future__ import annotations

from typing import Any

import numpy as np


class OnDevice:
    """Base class of values in the memory of a device: arrays, and nodes of a tree."""

    __slots__ = ()


class DeviceArray(OnDevice):
    """Base class of arrays in the memory of a device; np.asarray copies one to the host.

    Subclasses define `shape`, `dtype` and `zeros_like()`.
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
