"""Record runs for other programs: a module per tracker, which the option `track` names.

A module defines one subclass of `base.Tracker`. A text after the tracker's name, as in
`mlflow=mlruns`, is the first argument of the class. Modules import the library of their tracker
when a run starts.
"""

import importlib
import inspect
import pkgutil
from typing import Any

from mpidl.errors import UserError
from mpidl.text import did_you_mean

SHARED = {"base", "records"}


def names() -> list[str]:
    """Return the names of all trackers, which are the other modules in this folder."""
    return sorted({module.name for module in pkgutil.iter_modules(__path__)} - SHARED)


def load(name: str) -> type[Any]:
    """Return the class of a tracker; raise UserError if there is no tracker of this name."""
    if name not in names():
        hint = did_you_mean(name, names()) or f": expected {', '.join(names())}"
        raise UserError(f"--track {name}: unknown tracker{hint}")
    module = importlib.import_module(f"{__name__}.{name}")
    classes = [kind for _, kind in inspect.getmembers(module, inspect.isclass)]
    return next(kind for kind in classes if kind.__module__ == module.__name__)
