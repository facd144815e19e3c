"""Makes a Backend of modules that define its functions."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterable
from typing import cast

from mpidl.backends.interface import FUSED, HOST, Backend

FUNCTIONS = tuple(
    name
    for name, function in inspect.getmembers(Backend, inspect.isfunction)
    if not name.startswith("_")
)


# The modules that define them, in each backend's package.
FAMILIES = (
    *("conv", "transposed", "dense", "batchnorm", "activation", "pool", "lrn", "dropout", "join"),
    *("loss", "optimizer", "images"),
)


class _Functions(types.SimpleNamespace):
    """What `gather` returns: a Backend whose functions are plain attributes."""

    def __repr__(self):
        return f"<backend {self.name}>"


def families(package: str) -> list[types.ModuleType]:
    """Return the modules FAMILIES of a backend's package."""
    return [importlib.import_module(f"{package}.{family}") for family in FAMILIES]


def gather(
    name: str,
    families: Iterable[types.ModuleType],
    fallback: Backend | None = None,
    *,
    fuses_convolutions: bool = False,
    arrays_on_device: bool = False,
) -> Backend:
    """Return the Backend of these modules.

    Parameters
    ----------
    families : modules
        Each function of `Backend` is taken from the module that defines it.
    fallback : Backend, optional
        Has the functions that no module defines.

    Raises
    ------
    TypeError
        If a function of `Backend` is missing that the capabilities do not excuse.
    """
    functions = {
        function: value
        for family in families
        for function, value in vars(family).items()
        if function in FUNCTIONS and getattr(value, "__module__", None) == family.__name__
    }
    excused = (frozenset() if fuses_convolutions else FUSED) | (
        HOST if arrays_on_device else frozenset()
    )
    for function in sorted(set(FUNCTIONS) - set(functions) - excused):
        if not hasattr(fallback, function):
            raise TypeError(f"backend {name}: no module defines {function}")
        functions[function] = getattr(fallback, function)
    capabilities = {"fuses_convolutions": fuses_convolutions, "arrays_on_device": arrays_on_device}
    return cast(Backend, _Functions(name=name, **capabilities, **functions))
