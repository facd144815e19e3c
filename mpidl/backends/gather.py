"""Makes a Backend of modules that define its functions."""

from __future__ import annotations

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


class _Functions(types.SimpleNamespace):
    """What `gather` returns: a Backend whose functions are plain attributes."""

    def __repr__(self):
        return f"<backend {self.name}>"


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
    functions = _Functions(
        name=name, fuses_convolutions=fuses_convolutions, arrays_on_device=arrays_on_device
    )
    missing = (frozenset() if fuses_convolutions else FUSED) | (
        HOST if arrays_on_device else frozenset()
    )
    for family in families:
        for function in FUNCTIONS:
            if getattr(vars(family).get(function), "__module__", None) == family.__name__:
                setattr(functions, function, vars(family)[function])
    for function in FUNCTIONS:
        if not hasattr(functions, function) and function not in missing:
            if not hasattr(fallback, function):
                raise TypeError(f"backend {name}: no module defines {function}")
            setattr(functions, function, getattr(fallback, function))
    return cast(Backend, functions)
