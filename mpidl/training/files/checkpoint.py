"""Save and load checkpoints: the current checkpoint.h5 and checkpoint-previous.h5.

Each is a complete HDF5 file (see `model_file`) with everything that a run needs to resume, on any
number of ranks. At least one of them can be loaded at any time: `save` writes and flushes the new
file under a temporary name, renames the current file to the previous one, then renames the new
file to the current one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpidl.errors import UserError
from mpidl.files import write_whole
from mpidl.training.files import model_file

CURRENT, PREVIOUS = "checkpoint.h5", "checkpoint-previous.h5"
DESCRIPTION = ("network", "classes", "input_shape", "normalization")
OPTIONAL_DESCRIPTION = ("crop", "preprocess")


def save(
    folder: str, arrays: Mapping[str, Mapping[str, np.ndarray]], facts: Mapping[str, Any]
) -> None:
    """Write a checkpoint, and keep the current one as the previous one.

    Parameters
    ----------
    folder : path
        The folder of the run.
    arrays : dict
        {"learnables": {"conv1.weight": array, ...}, "state": {...}, "optimizer": {...}, ...}
    facts : dict
        Values for JSON, such as position and options. "network" (the list of layers), "classes",
        "input_shape" and "normalization" are required. Floats are stored exactly.

    Raises
    ------
    UserError
        If the file cannot be written. The existing checkpoints are not changed then.
    """
    optional = {name: facts.get(name) for name in OPTIONAL_DESCRIPTION}
    attributes = model_file.describe(*(facts[name] for name in DESCRIPTION), **optional)
    described = (*DESCRIPTION, *OPTIONAL_DESCRIPTION)
    remaining_facts = {name: value for name, value in facts.items() if name not in described}
    attributes["facts"] = json.dumps(remaining_facts, default=_python_number)
    current = os.path.join(folder, CURRENT)
    # If a crash left a damaged checkpoint.h5, it must not replace a complete previous one.
    previous = os.path.join(folder, PREVIOUS) if _is_whole(current) else None
    write_whole(current, model_file.pack(arrays, attributes), previous)


def load(
    folder: str, warn: Callable[[str], Any] | None = None
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """Load the newest checkpoint that is complete.

    Parameters
    ----------
    folder : path
        The folder of the run.
    warn : callable, optional
        Called with a line of text if checkpoint.h5 is missing or damaged and the previous
        checkpoint is loaded. By default the line is printed on stderr.

    Returns
    -------
    arrays, facts : dict
        The arguments of `save`.

    Raises
    ------
    UserError
        If the folder has no checkpoint that can be loaded.
    """
    problems = []
    for name in (CURRENT, PREVIOUS):
        path = os.path.join(folder, name)
        try:
            arrays, attributes = model_file.read(path)
        except model_file.Torn as error:
            problems.append(f"{path}: {error}")
            continue
        facts = {**json.loads(attributes["facts"]), **model_file.described(attributes)}
        if problems:
            line = f"warning: {problems[0]}; continuing from {name}"
            print(line, file=sys.stderr, flush=True) if warn is None else warn(line)
        return arrays, facts
    if not exists(folder):
        raise UserError(f"--resume {folder}: expected a folder with {CURRENT}, found none")
    raise UserError(f"--resume {folder}: no checkpoint can be loaded: {'; '.join(problems)}")


def exists(folder: str) -> bool:
    """Return whether the folder has a checkpoint, complete or damaged."""
    return any(os.path.lexists(os.path.join(folder, name)) for name in (CURRENT, PREVIOUS))


def _is_whole(path):
    # Reading a whole file takes less time than writing and flushing the new one.
    try:
        model_file.read(path)
    except model_file.Torn:
        return False
    return True


def _python_number(value):
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a checkpoint's facts hold strings and numbers, not {type(value).__name__}")
