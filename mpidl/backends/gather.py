"""Create a Backend from the modules that define its functions."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterable
from typing import cast

from mpidl.backends.interface import FUSED, HOST, Backend

FUNCTIONS = tuple(
    name
    for name, function in inspect.getmembers(Backend, inspect.isfunction)
    if not name.startswith("_")
)


# The modules in each backend's package that define the backend's functions.
FAMILIES = """
conv transposed dense recurrent batchnorm group_norm activation pool resample pad lrn dropout gates
join loss overlap optimizer images
""".split()


class _Functions(types.SimpleNamespace):
    """The Backend that `gather` returns, with the backend's functions as attributes."""

    def __repr__(self):
        return f"<backend {self.name}>"


def families(package: str) -> list[types.ModuleType]:
    """Import the modules named in FAMILIES from a backend's package, and return them."""
    return [importlib.import_module(f"{package}.{family}") for family in FAMILIES]


def gather(
    name: str,
    families: Iterable[types.ModuleType],
    fallback: Backend | None = None,
    *,
    adapt: Callable[[str, Callable], Callable] | None = None,
    fuses_convolutions: bool = False,
    arrays_on_device: bool = False,
) -> Backend:
    """Return a Backend with the functions of these modules.

    Parameters
    ----------
    name : str
        Name of the backend.
    families : modules
        The modules that define the functions of `Backend`.
    fallback : Backend, optional
        Backend that provides the functions missing from the modules. By default, none may be
        missing.
    adapt : callable, optional
        The backend has adapt(name, function) in place of each function.
    fuses_convolutions, arrays_on_device : bool
        Capabilities of the backend; see `Backend`.

    Raises
    ------
    TypeError
        If a function is missing that a backend with these capabilities must have.
    """
    functions = {
        function: value
        for family in families
        for function, value in vars(family).items()
        if function in FUNCTIONS and getattr(value, "__module__", None) == family.__name__
    }
    if adapt is not None:
        functions = {function: adapt(function, value) for function, value in functions.items()}
    excused = (frozenset() if fuses_convolutions else FUSED) | (
        HOST if arrays_on_device else frozenset()
    )
    for function in sorted(set(FUNCTIONS) - set(functions) - excused):
        if not hasattr(fallback, function):
            raise TypeError(f"backend {name}: no module defines {function}")
        functions[function] = getattr(fallback, function)
    capabilities = {
        "fuses_convolutions": fuses_convolutions,
        "arrays_on_device": arrays_on_device,
    }
    return cast(Backend, _Functions(name=name, **capabilities, **functions))
