"""Convert arrays to and from bfloat16, the upper 16 bits of a float32.

kernels/cpu/value.h explains the rounding.
"""

import numpy as np

from mpidl.core.values import BF16

SMALLEST = np.float32(2.0**-56)  # smaller magnitudes become zero


def rounded(x):
    """Round float32 numbers to the nearest bfloat16 number, as float32."""
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    nearest = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)).astype(np.uint32) & 0xFFFF0000
    nearest = np.where(np.isnan(x), (bits & 0xFFFF0000) | 0x400000, nearest)
    return np.where(np.abs(x) < SMALLEST, np.uint32(0), nearest).view(np.float32)


def narrowed(x):
    """Convert float32 to bfloat16."""
    return (rounded(x).view(np.uint32) >> 16).astype(np.uint16).view(BF16)


def widened(x):
    """Convert bfloat16 to float32."""
    return (np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def as_type(x, dtype):
    """Return an array in a dtype, of which one is BF16."""
    return narrowed(x) if dtype == BF16 else widened(x).astype(dtype, copy=False)
