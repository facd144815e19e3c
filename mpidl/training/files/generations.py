"""Check the checkpoints and the model of a run, without creating its network or starting MPI."""

from __future__ import annotations

import datetime
import os
from typing import NamedTuple

from mpidl import numerics
from mpidl.errors import UserError
from mpidl.text import printable
from mpidl.training.files import checkpoint, model_file

MODEL = "model.h5"


class Generation(NamedTuple):
    """Facts about a checkpoint or a model file.

    Attributes
    ----------
    name : str
        Name of the file.
    date : str
        Local time of the last write; empty if the file is missing.
    iteration, epoch : int or None
        Position of a checkpoint: the number of iterations so far, and the epoch of the last
        iteration. None for a model, and for a file that cannot be loaded.
    weights_sha256 : str
        Hash of the weights, as returned by `dl.weights_sha256`; empty if the file cannot be loaded.
    origin : str
        The arithmetic and the mpidl that made the file, such as "numerics 1, mpidl 0.1.0" or
        "before numerics 1"; empty if the file cannot be loaded.
    problem : str or None
        Why the file cannot be loaded; None if the file is complete.
    """

    name: str
    date: str = ""
    iteration: int | None = None
    epoch: int | None = None
    weights_sha256: str = ""
    origin: str = ""
    problem: str | None = None


def generations(path: str | os.PathLike[str]) -> list[Generation]:
    """Check the checkpoints and the model file of a run.

    Parameters
    ----------
    path : path
        The folder of a run, or one of its files.

    Returns
    -------
    list of Generation
        One element for each file that exists, in this order: the newest checkpoint, the previous
        checkpoint, the model. If only the previous checkpoint exists, the list still has an element
        for the newest checkpoint. If `path` is a file, the list contains only that file.

    Raises
    ------
    UserError
        If `path` does not exist, or if the folder has neither a checkpoint nor a model.
    """
    if not os.path.exists(path):
        raise UserError(f"{printable(path)}: expected the folder of a run, found nothing there")
    if not os.path.isdir(path):
        return [_check(os.fspath(path))]
    names = [checkpoint.CURRENT, checkpoint.PREVIOUS] if checkpoint.exists(os.fspath(path)) else []
    names += [MODEL]
    paths = [os.path.join(path, name) for name in names]
    paths = [path for path in paths if os.path.lexists(path) or _is_current(path)]
    if not paths:
        raise UserError(
            f"{printable(path)}: expected the folder of a run, found neither {checkpoint.CURRENT} "
            f"nor {MODEL} in it"
        )
    return [_check(path) for path in paths]


def are_newest_complete(checked: list[Generation]) -> bool:
    """Return whether all files except the previous checkpoint are complete."""
    return not any(file.problem for file in checked if file.name != checkpoint.PREVIOUS)


def _is_current(path):
    return os.path.basename(path) == checkpoint.CURRENT


def _check(path):
    file = Generation(os.path.basename(path))
    try:
        seconds = int(os.stat(path).st_mtime)
        file = file._replace(date=str(datetime.datetime.fromtimestamp(seconds)))
        tables, attributes = model_file.read(path)
        facts = checkpoint.facts_of(attributes) if "facts" in attributes else None
    except OSError as error:
        problem = "it is missing" if isinstance(error, FileNotFoundError) else error.strerror
        return file._replace(problem=problem)
    except model_file.Torn as error:
        return file._replace(problem=str(error))
    digest = model_file.sha256_of(tables.get("learnables", {}), tables.get("state", {}))
    origin = numerics.describe(attributes.get("numerics"), attributes.get("mpidl_version"))
    file = file._replace(weights_sha256=digest, origin=origin)
    if facts is None:  # a model
        return file
    position = facts.get("position", {})
    epoch = position.get("epoch", 0)
    is_between = not position.get("batch")
    return file._replace(iteration=position.get("iteration"), epoch=epoch - is_between)
