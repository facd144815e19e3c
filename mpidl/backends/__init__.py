"""Select the backend that computes on an array, and set the options of backends.

All backends implement the functions that `interface` documents: `reference` in NumPy, `cpu` in C,
and `gpu` in CUDA. `of_value` selects the backend for a Blocked value by the dtype and the memory
(host or GPU) of the array that holds the value.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.core.values import BF16, is_device_array
from mpidl.errors import UserError

if TYPE_CHECKING:
    from mpidl.backends.cpu.backend import CPU as CPU
    from mpidl.backends.interface import Backend
    from mpidl.backends.reference.backend import REFERENCE as REFERENCE
    from mpidl.core.blocks import Blocked

WINOGRAD = ("auto", "off", "fast")
PRECISIONS = {"cpu": ("fp32", "bf16"), "gpu": ("fp32", "bf16", "tf32")}  # by device


def of_value(x: Blocked) -> Backend:
    """Return the backend for a Blocked value."""
    return of_array(x.stored_array)


def of_array(array: Any) -> Backend:
    """Return the GPU backend for an array in GPU memory, else `of_type(array.dtype)`."""
    if is_device_array(array):
        return _backend("gpu")
    return of_type(array.dtype)


def of_type(dtype: Any) -> Backend:
    """Return the backend for NumPy arrays of a dtype.

    Return the CPU backend for float32 and bfloat16 if this process can run the C kernels, else the
    NumPy backend.
    """
    has_kernels = dtype in (np.float32, BF16) and builds.kernels() is not None
    return _backend("cpu" if has_kernels else "reference")


def converted(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Return an array of float32 or bfloat16 numbers in the other of these two types."""
    if is_device_array(array):
        return array.astype(dtype)
    convert = "reference.bf16" if builds.kernels() is None else "cpu.call"
    return importlib.import_module(f"mpidl.backends.{convert}").as_type(array, dtype)


@functools.cache
def _backend(package: str) -> Backend:
    """Import a backend when the first array needs it."""
    return getattr(importlib.import_module(f"mpidl.backends.{package}.backend"), package.upper())


def __getattr__(name: str) -> Backend:
    if name in ("CPU", "REFERENCE"):
        return _backend(name.lower())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def configure(
    *, threads: int | None = None, winograd: str | None = None, precision: str | None = None
) -> None:
    """Set options of the backends. All options except `threads` must be equal on all ranks.

    Parameters
    ----------
    threads : int, optional
        Number of threads that the C kernels use on this rank. Results do not depend on this
        number.
    winograd : {"auto", "off", "fast"}, optional
        Algorithm for 3x3 and 5x5 convolutions with stride 1, and for larger filters with a stride,
        such as 11x11 with stride 4. "auto" uses Winograd's algorithm. Its tiles have mostly 4x4
        outputs in backward passes. In forward passes, it uses the largest tiles whose error is
        similar to the error of direct sums: 2x2 outputs from 16 channels, 2x4 from 32 and 4x4 from
        128, and for 5x5 filters 2x2 from 32 channels. "off" computes direct sums. "fast" uses 4x4
        tiles in all forward passes, with a larger error. Results depend on this option.
    precision : {"fp32", "bf16", "tf32"}, optional
        Precision of the products. "fp32" has the accuracy of float32 on every device. "bf16"
        multiplies and stores activations in bfloat16; CPUs and GPUs give different bytes. "tf32",
        on GPUs, rounds the inputs of convolutions and dense layers to TF32. Results depend on this
        option. Before you set "tf32", call `world.use_device("gpu")`.

    Raises
    ------
    ValueError
        If `winograd` or `precision` is not one of these values, or if `threads` is less than 1.
    UserError
        If the device of this process does not have the precision.
    """
    if precision is not None:
        names = dict.fromkeys(itertools.chain(*PRECISIONS.values()))
        if precision not in names:
            raise ValueError(f"precision must be one of {', '.join(names)}, got {precision!r}")
        check_precision(precision, on_gpu=settings.on_gpu)
        settings.precision = precision
    if winograd is not None:
        if winograd not in WINOGRAD:
            raise ValueError(f"winograd must be one of {', '.join(WINOGRAD)}, got {winograd!r}")
        settings.winograd = winograd
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        library, settings.threads_chosen = builds.kernels(), True
        # `set_threads` returns a smaller number if the system cannot start as many threads
        settings.threads = library.set_threads(threads) if library is not None else 1


def check_precision(precision: str, *, on_gpu: bool) -> None:
    """Raise a UserError if GPUs, or else CPUs, do not have a precision."""
    device, other = ("gpu", "cpu") if on_gpu else ("cpu", "gpu")
    if precision not in PRECISIONS[device]:
        raise UserError(
            f"--precision {precision}: expected {' or '.join(PRECISIONS[device])} on "
            f"{device.upper()}s; {precision} needs --device {other}"
        )


@contextlib.contextmanager
def fast_convolutions() -> Iterator[None]:
    """Use Winograd tiles of 4x4 outputs in forward passes within the `with` block.

    Predictions use these tiles, because their scores change only by rounding. Training uses
    smaller tiles in layers with few inputs, because the larger error of 4x4 tiles could flip a ReLU
    and change gradients. If the option `winograd` is "off", it stays "off".
    """
    winograd = settings.winograd
    settings.winograd = "fast" if winograd == "auto" else winograd
    try:
        yield
    finally:
        settings.winograd = winograd
