"""Save and load checkpoints: checkpoint.h5, checkpoint-previous.h5, and those that a run keeps.

Each checkpoint is a complete HDF5 file (see `model_file`) with everything that a run needs to
resume on any number of ranks. At any time, at least one of the two files can be loaded, because
`save` has three steps. It writes and flushes the new file under a temporary name, renames
checkpoint.h5 to checkpoint-previous.h5, and then renames the new file to checkpoint.h5. If the run
keeps the checkpoint, the new file gets its second path before that, so a run that resumes from
checkpoint.h5 has all checkpoints that it keeps up to this iteration.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpidl import numerics
from mpidl.errors import UserError
from mpidl.files import reason, stamp, write_whole
from mpidl.text import printable
from mpidl.training.files import model_file

CURRENT, PREVIOUS = "checkpoint.h5", "checkpoint-previous.h5"
KEEP_FOLDER = "checkpoints"  # folder of the checkpoints that a run keeps


def save(
    folder: str, arrays: Mapping[str, Mapping[str, np.ndarray]], facts: Mapping[str, Any]
) -> None:
    """Write a new checkpoint, and keep the current checkpoint as the previous one.

    Parameters
    ----------
    folder : path
        The folder of the run.
    arrays : dict
        {"learnables": {"conv1.weight": array, ...}, "state": {...}, "optimizer": {...}, ...}
    facts : dict
        Values to store as JSON, such as the position in the run and the options. The keys "network"
        (the list of layers), "classes", "input_shape" and "normalization" are required. Floats are
        stored exactly.

    Raises
    ------
    UserError
        If the file cannot be written. In this case, the existing checkpoints are unchanged.
    """
    write(folder, arrays, attributes_of(facts))


def attributes_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the root attributes of a checkpoint file for the argument `facts` of `save`."""
    attributes = model_file.describe(facts)
    remaining_facts = {n: value for n, value in facts.items() if n not in model_file.CODING}
    attributes["facts"] = json.dumps(remaining_facts, default=_python_number)
    return attributes


def write(
    folder: str,
    arrays: Mapping[str, Mapping[str, np.ndarray]],
    attributes: Mapping[str, Any],
    confirm: Callable[[], object] = lambda: None,
    keep: int | None = None,
) -> None:
    """Write a checkpoint like `save`, with attributes that `attributes_of` returned.

    `confirm` is called just before the new file replaces checkpoint.h5. If `confirm` raises an
    exception, the existing checkpoints are unchanged. `keep` is the iteration of a checkpoint that
    the run also keeps.
    """
    global _written
    current = os.path.join(folder, CURRENT)
    # A checkpoint.h5 that a crash damaged must not replace a complete previous checkpoint.
    is_known = _written is not None and _identity(current) == _written
    previous = os.path.join(folder, PREVIOUS) if is_known or _is_whole(current) else None
    also = None if keep is None else path_of(folder, keep)
    write_whole(current, model_file.pack(arrays, attributes), previous, confirm, also=also)
    _written = _identity(current)


def path_of(folder: str | os.PathLike[str], iteration: int) -> str:
    """Return the path of a checkpoint that a run keeps."""
    return os.path.join(folder, KEEP_FOLDER, f"{iteration:08d}.h5")


def folder_of(path: str | os.PathLike[str]) -> str:
    """Return the folder of a run, given this folder or the file of a checkpoint."""
    if not os.path.isfile(path):
        return os.fspath(path)
    folder, name = os.path.split(os.path.dirname(os.path.abspath(path)))
    return folder if name == KEEP_FOLDER else os.path.join(folder, name)


def kept_paths(folder: str | os.PathLike[str]) -> dict[int, str]:
    """Return {iteration: path} of the checkpoints that a run has kept, in their order."""
    try:
        names = sorted(os.listdir(os.path.join(folder, KEEP_FOLDER)))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    numbers = (int(name[:-3]) for name in names if re.fullmatch(r"[0-9]{8,}\.h5", name))
    paths = {number: path_of(folder, number) for number in numbers}
    return {number: path for number, path in paths.items() if os.path.isfile(path)}


def remove_kept(folder: str | os.PathLike[str], after: int) -> None:
    """Remove the kept checkpoints of later iterations, which the run will write again."""
    for iteration, path in kept_paths(folder).items():
        if iteration > after:
            try:
                os.unlink(path)
            except OSError as error:
                raise UserError(f"{path}: cannot be removed: {reason(error)}") from error


def load(
    folder: str, warn: Callable[[str], Any] | None = None
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """Load the newest checkpoint that is complete.

    Parameters
    ----------
    folder : path
        The folder of the run, or the file of a checkpoint.
    warn : callable, optional
        Function to call with a one-line warning if checkpoint.h5 is missing or damaged, and the
        previous checkpoint is loaded instead. By default, the line is printed to stderr.

    Returns
    -------
    arrays, facts : dict
        The arrays and facts that were passed to `save`.

    Raises
    ------
    UserError
        If the folder has no checkpoint that can be loaded.
    """
    problems, names = [], (CURRENT, PREVIOUS)
    if is_file := os.path.isfile(folder):
        folder, names = os.path.split(folder)[0], (os.path.basename(folder),)
    for name in names:
        path = os.path.join(folder, name)
        try:
            arrays, attributes = model_file.read(path)
            facts = facts_of(attributes)
        except model_file.Torn as error:
            problems.append(f"{path}: {error}")
            continue
        if problems:
            line = f"warning: {problems[0]}; continuing from {name}"
            print(line, file=sys.stderr, flush=True) if warn is None else warn(line)
        return arrays, facts
    if not is_file and not exists(folder):
        raise UserError(f"--resume {folder}: expected a folder with {CURRENT}, found none")
    raise UserError(f"--resume {folder}: no checkpoint can be loaded: {'; '.join(problems)}")


def check_numerics(facts: Mapping[str, Any], spelled: str = "resume") -> None:
    """Raise UserError if a run cannot continue, because this mpidl computes other weights.

    A run that mixes two arithmetics could never be repeated. Files without a numerics are older
    than its first version, and their runs continue with the arithmetic of numerics 1.
    """
    version, writer = facts.get("numerics"), facts.get("mpidl_version")
    if (1 if version is None else version) == numerics.VERSION:
        return
    writer = "the mpidl that" if writer is None else f"mpidl {printable(writer):.40}, which"
    raise UserError(
        f"{spelled}: expected a checkpoint of {numerics.describe(numerics.VERSION)}, found one "
        f"{'from' if version is None else 'of'} {numerics.describe(version)}, whose arithmetic "
        f"gives other weights: to continue the run, use {writer} wrote the checkpoint"
    )


def facts_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts in the root attributes of a checkpoint file.

    Raises
    ------
    Torn
        If the attributes are not those of a checkpoint.
    """
    if "facts" not in attributes:
        raise model_file.Torn("it is a model, not a checkpoint")
    try:
        return {**json.loads(attributes["facts"]), **model_file.described(attributes)}
    except (KeyError, TypeError, ValueError) as error:
        raise model_file.Torn(f"its attributes cannot be read: {error}") from error


def exists(folder: str) -> bool:
    """Return whether the folder contains a checkpoint, even a damaged one."""
    return any(os.path.lexists(os.path.join(folder, name)) for name in (CURRENT, PREVIOUS))


_written: tuple | None = None  # identity of the last checkpoint that this process has written


def _identity(path):
    """Return values that identify a file and its current version; None if the file is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, stamp(status)


def _is_whole(path):
    # Reading the whole file takes less time than writing and flushing the new checkpoint.
    try:
        model_file.read(path)
    except model_file.Torn:
        return False
    return True


def _python_number(value):
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a checkpoint's facts hold strings and numbers, not {type(value).__name__}")
