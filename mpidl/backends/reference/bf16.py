"""Convert arrays to and from bfloat16, the upper 16 bits of a float32.

kernels/cpu/value.h explains the rounding. `for_bf16` lets the functions of this backend, which
compute in float32 or float64, read and return arrays in bfloat16.
"""

import functools

import numpy as np

from mpidl.backends import settings
from mpidl.core.values import BF16

# Functions that read bfloat16 themselves: the order of their sums is defined, or they only store.
AS_STORED = frozenset({"conv2d", "conv2d_backward", "channel_sums", "source"})
AS_STORED |= {"transposed_conv2d", "transposed_conv2d_backward"}
AS_STORED |= {"dense", "dense_dx", "dense_dweight", "dense_backward"}
AS_STORED |= {"recurrence", "recurrence_backward"}

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
    """Return an array in a dtype; if the types differ, one of the two is BF16."""
    if x.dtype == dtype:
        return x
    return narrowed(x) if dtype == BF16 else widened(x).astype(dtype, copy=False)


def operand(x):
    """Return the operand of a layer with weights: images in bfloat16 if that is the precision."""
    return narrowed(x) if settings.precision == "bf16" and x.dtype == np.float32 else x


def for_bf16(name, function):
    """Return a function that also reads lanes in bfloat16. Its lanes are then in bfloat16, too."""
    if name in AS_STORED:
        return function

    @functools.wraps(function)
    def call(*arguments, **keywords):
        if not _has_bf16([*arguments, *keywords.values()]):
            return function(*arguments, **keywords)
        arguments = _converted(arguments, BF16, widened)
        keywords = {key: _converted(value, BF16, widened) for key, value in keywords.items()}
        results = function(*arguments, **keywords)
        return _converted(results, np.float32, narrowed)

    return call


def _has_bf16(value):
    if isinstance(value, list | tuple):
        return any(map(_has_bf16, value))
    return isinstance(value, np.ndarray) and value.dtype == BF16


def _converted(value, dtype, convert):
    """Convert an array of this dtype, and each such array in a list or tuple."""
    if type(value) in (list, tuple):
        return type(value)(_converted(part, dtype, convert) for part in value)
    is_array = isinstance(value, np.ndarray) and value.dtype == dtype
    return convert(value) if is_array else value
