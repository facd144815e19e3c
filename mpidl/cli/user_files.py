"""Load functions and layer classes from the user's Python files."""

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from types import ModuleType

from mpidl.errors import UserError
from mpidl.nn import Layer
from mpidl.training.options.option_types import nearest


def load_user_function(text: str, option: str) -> Callable:
    """Return the function that FILE.py:FUNCTION names.

    Parameters
    ----------
    text : str
        FILE.py:FUNCTION.
    option : str
        The flag to name in error messages.

    Raises
    ------
    UserError
        If the file does not exist or does not define the function.
    """
    path, _, name = text.rpartition(":")
    try:
        module = load_user_file(path)
    except UserError as error:
        raise UserError(f"{option} {text}: {error}") from error
    if not callable(getattr(module, name, None)):
        functions = [word for word, value in vars(module).items() if callable(value)]
        raise UserError(
            f"{option} {text}: {path} defines no function {name}{nearest(name, functions)}"
        )
    return getattr(module, name)


def user_layers(path: str | None) -> list[type[Layer]]:
    """Return the layer classes that a user's Python file defines or imports.

    Classes of mpidl itself are omitted. If `path` is None, the list is empty.

    Raises
    ------
    UserError
        If the file does not exist or has no layer class.
    """
    if path is None:
        return []
    try:
        module = load_user_file(path)
    except UserError as error:
        raise UserError(f"--layers: {error}") from None
    layers = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, Layer)
        and not kind.__module__.startswith("mpidl.")
    ]
    if not layers:
        raise UserError(f"--layers {path}: expected a class derived from dl.Layer, found none")
    return layers


def load_user_file(path: str | os.PathLike) -> ModuleType:
    """Run a user's Python file and return it as a module.

    Each call runs the file again. The module is stored in `sys.modules` under a name derived from
    the path, because pickle and dataclasses look up modules there.

    Parameters
    ----------
    path : path
        The Python file.

    Raises
    ------
    UserError
        If the file does not exist or is not a .py file. Exceptions that the file itself raises are
        not converted.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise UserError(f"no such file: {path}")
    if not path.endswith(".py"):
        raise UserError(f"expected a Python file, FILE.py, found {path}")
    name = "mpidl_user_" + re.sub(r"\W", "_", os.path.abspath(path).removesuffix(".py"))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
