"""Backends: the same functions with the same arguments for each kind of array.

`of(x)` picks one by the type of its lanes. A backend works on lanes `(blocks, *image_shape, 16)`,
knows nothing of tapes or ranks, and hands every sum over images to the fold leaf by leaf.
"""

import numpy as np

from mpidl.backends import reference, settings
from mpidl.backends.cpu import builds
from mpidl.blocks import DeferredInput

WINOGRAD = ("auto", "off", "fast")
PRECISION = ("fp32", "tf32")


def of(x):
    """The backend for a Blocked value: by where its lanes lie, and their type."""
    lanes = x.source
    return of_array(lanes.x if isinstance(lanes, DeferredInput) else lanes)


def of_array(array):
    """The backend for an array: the C kernels for float32 where they are, else NumPy; or the GPU's
    for one that lies there."""
    host = isinstance(array, (np.ndarray, np.generic))
    return of_type(array.dtype) if host else array.backend


def of_type(dtype):
    """The backend for NumPy arrays of a type."""
    if dtype == np.float32 and builds.kernels() is not None:
        from mpidl.backends import cpu

        return cpu
    return reference


def configure(*, threads=None, winograd=None, precision=None):
    """Set what holds for this process; the same on all ranks, but for `threads`.

    threads: of a rank, in the C kernels; the bytes do not depend on it. winograd: "auto" (3x3
    convolutions at stride 1: F(2x2) forward from 32 channels on, F(4x4) backward), "off" (direct
    sums), "fast" (F(4x4) forward too, whose error is larger): the bytes depend on it. precision, of
    products on a GPU's tensor cores: "fp32" (3xTF32) or "tf32": the bytes depend on it, too.
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
        library, settings.chosen = builds.kernels(), True
        # fewer where the system starts no more
        settings.threads = library.set_threads(threads) if library is not None else 1
