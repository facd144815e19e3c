"""Load functions and layer classes from the user's Python files.

A checkpoint never decides alone which code runs: see `check_resumed`.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from mpidl.errors import UserError
from mpidl.files import sha256_of_file
from mpidl.nn import Layer
from mpidl.text import did_you_mean, printable


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
            f"{option} {text}: {path} defines no function {name}{did_you_mean(name, functions)}"
        )
    return getattr(module, name)


def network_file(network: str | None) -> dict[str, str] | None:
    """Return {"path", "sha256"} of the Python file of --network FILE.py:FUNCTION.

    Return None if `network` names no file, or if the file does not exist.
    """
    path = (network or "").rpartition(":")[0]
    if not path.endswith(".py") or not os.path.isfile(path):
        return None
    return {"path": path, "sha256": sha256_of_file(path)}


def check_resumed(network: str | None, facts: Mapping[str, Any], folder: str | os.PathLike) -> None:
    """Raise UserError unless a resumed run may run the Python file that its checkpoint names.

    The checkpoint may come from somebody else. The file must therefore be outside the folder of
    the run, and unchanged since the run used it. Users who trust another file repeat --network.
    An archive that brings both a folder and the file outside it passes the check.

    Parameters
    ----------
    network
        The value of --network in the checkpoint.
    facts
        The facts of the checkpoint, with the result of `network_file` as "network_file".
    folder
        The folder of the checkpoint.
    """
    path = (network or "").rpartition(":")[0]
    if not path.endswith(".py"):
        return
    saved, now = facts.get("network_file"), network_file(network)
    name, inside = printable(path), os.path.join(os.path.realpath(folder), "")
    digest = saved.get("sha256") if isinstance(saved, dict) else None
    digest = digest if isinstance(digest, str) else None
    expected = f"with sha256 {printable((digest or '')[:12])}"
    if os.path.realpath(path).startswith(inside):
        problem = f"expected a Python file outside the folder, found {name} in it"
    elif digest is None:
        problem = f"expected a checkpoint with the sha256 of {name}, found none"
    elif now is None:
        problem = f"expected {name} {expected}, found no such file"
    elif now["sha256"] != digest:
        problem = f"expected {name} {expected}, as in the run, found {now['sha256'][:12]}"
    else:
        return
    raise UserError(
        f"--resume {printable(folder)}: the checkpoint names Python code: {problem}; if you trust "
        f"the file, repeat --network {printable(str(network))}"
    )


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
    assert spec is not None and spec.loader is not None  # for a path that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
