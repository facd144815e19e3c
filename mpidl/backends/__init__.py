"""Backends: the same functions with the same arguments for each kind of array.

`of(x)` picks the `Backend` for a value by the type of its lanes and by where they lie. `interface`
says what each function does; `reference`, `cpu` and `gpu` implement them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.backends.cpu.backend import CPU
from mpidl.backends.interface import Backend
from mpidl.backends.reference.backend import REFERENCE
from mpidl.blocks import Blocked, DeferredInput
from mpidl.device_array import is_device_array

WINOGRAD = ("auto", "off", "fast")
PRECISION = ("fp32", "tf32")


def of(x: Blocked) -> Backend:
    """Return the backend for a Blocked value."""
    lanes = x.source
    return of_array(lanes.x if isinstance(lanes, DeferredInput) else lanes)


def of_array(array: Any) -> Backend:
    """Return the backend for an array: the GPU's if it lies there, else `of_type` of its type."""
    if is_device_array(array):
        from mpidl.backends.gpu.backend import GPU  # late: runs on CPUs load nothing of it

        return GPU
    return of_type(array.dtype)


def of_type(dtype: Any) -> Backend:
    """Return the backend for NumPy arrays of a type.

    These are the C kernels for float32 if this process has a build of them, else NumPy.
    """
    return CPU if dtype == np.float32 and builds.kernels() is not None else REFERENCE


def configure(
    *, threads: int | None = None, winograd: str | None = None, precision: str | None = None
) -> None:
    """Set options of this process. All ranks must set the same, except for `threads`.

    Parameters
    ----------
    threads : int, optional
        Threads of this rank in the C kernels. The bytes of results do not depend on it.
    winograd : {"auto", "off", "fast"}, optional
        How 3x3 convolutions at stride 1 are computed; the bytes depend on it. "auto": F(2x2)
        forward from 32 channels on, F(4x4) backward; "off": direct sums; "fast": F(4x4) forward
        too, whose error is larger.
    precision : {"fp32", "tf32"}, optional
        Of products on a GPU's tensor cores; the bytes depend on it. "fp32" is 3xTF32.

    Raises
    ------
    ValueError
        If an option is none of these, or `threads` is less than 1.
    """
    if precision is not None:
        if precision not in PRECISION:
            raise ValueError(f"precision must be one of {', '.join(PRECISION)}, got {precision!r}")
        settings.precision = precision
    if winograd is not None:
        if winograd not in WINOGRAD:
            raise ValueError(f"winograd must be one of {', '.join(WINOGRAD)}, got {winograd!r}")
        settings.winograd = winograd
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        library, settings.threads_chosen = builds.kernels(), True
        # fewer where the system starts no more
        settings.threads = library.set_threads(threads) if library is not None else 1
