"""Two generations of checkpoints: checkpoint.h5 and checkpoint-previous.h5.

Each is a whole HDF5 file (see `modelfile`) with all that a run needs to go on, on any number of
ranks. At every instant at least one of them can be loaded: the new one is written and flushed under
another name, the one before it takes the place of the previous one, the new one takes its own.
"""

import json
import os
import sys

import numpy as np

from mpidl.errors import UserError
from mpidl.training.files import model_file

CURRENT, PREVIOUS = "checkpoint.h5", "checkpoint-previous.h5"
DESCRIPTION = ("network", "classes", "input_shape", "normalization")


def save(folder, arrays, facts):
    """Write a checkpoint; the one before it becomes the previous one.

    arrays: {"learnables": {"conv1.weight": array, ...}, "state": {...}, "optimizer": {...}, ...}.
    facts: whatever else JSON can hold (position, seed, options, running sums), with "network" (the
    list of layers), "classes", "input_shape" and "normalization". Floats keep every bit. Raises
    UserError, naming the path, where it cannot be written; what was there before stays there.
    """
    seen = {name: facts.get(name) for name in ("crop", "preprocess")}
    attributes = model_file.describe(*(facts[name] for name in DESCRIPTION), **seen)
    known = (*DESCRIPTION, *seen)
    rest = {name: value for name, value in facts.items() if name not in known}
    attributes["facts"] = json.dumps(rest, default=_plain)
    current = os.path.join(folder, CURRENT)
    # A torn one, as a crash may have left it, must not take the place of a whole one.
    aside = os.path.join(folder, PREVIOUS) if _is_whole(current) else None
    model_file.write_whole(current, model_file.pack(arrays, attributes), aside)


def load(folder, warn=None):
    """(arrays, facts) of the newest checkpoint that is whole, as `save` was given them.

    warn(line) is told where that is not checkpoint.h5; by default it prints to stderr. Raises
    UserError where there is none.
    """
    torn = []
    for name in (CURRENT, PREVIOUS):
        path = os.path.join(folder, name)
        try:
            arrays, attributes = model_file.read(path)
        except model_file.Torn as error:
            torn.append(f"{path}: {error}")
            continue
        facts = {**json.loads(attributes["facts"]), **model_file.described(attributes)}
        if torn:
            line = f"warning: {torn[0]}; going on from {name}"
            print(line, file=sys.stderr, flush=True) if warn is None else warn(line)
        return arrays, facts
    if not exists(folder):
        raise UserError(f"--resume {folder}: expected a folder with {CURRENT}, found none")
    raise UserError(f"--resume {folder}: no checkpoint can be loaded: {'; '.join(torn)}")


def exists(folder):
    """Whether there is a checkpoint here, whole or torn."""
    return any(os.path.lexists(os.path.join(folder, name)) for name in (CURRENT, PREVIOUS))


def _is_whole(path):
    # Reading it all back costs less than writing and flushing the new one did.
    try:
        model_file.read(path)
    except model_file.Torn:
        return False
    return True


def _plain(value):
    """NumPy's numbers as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a checkpoint's facts hold texts and numbers, not {type(value).__name__}")
