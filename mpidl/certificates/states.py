"""Digests of the state of a run, as README.md defines them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.certificates import chain
from mpidl.evaluation.validation import BEST
from mpidl.training.files import run_state
from mpidl.training.progress import Position

if TYPE_CHECKING:
    from mpidl.training.run import Run

Tables = Mapping[str, Mapping[str, np.ndarray]]

LARGE = 8 << 20  # tables of at least this many bytes in all are hashed by threads
TIMES = ("seconds",)  # entries of a position that differ from run to run


def state_of(trainer: Run) -> dict[str, Any]:
    """Return the entries of a state: its epoch, its rollbacks and its digests.

    On a GPU, the caller has called `trainer.wait()`.
    """
    position = trainer.position
    return {
        "epoch": position.epoch,
        "rollbacks": position.rollbacks,
        "tables": table_digests(run_state.tables(trainer)[0]),
        "progress": progress_digest(position),
    }


def progress_digest(position: Position) -> str:
    """Return the digest of the entries of a position that do not depend on time."""
    entries = {name: value for name, value in asdict(position).items() if name not in TIMES}
    return chain.digest({name: _plain(value) for name, value in entries.items()})


def _plain(value):
    return value.item() if isinstance(value, np.generic) else value


def table_digests(tables: Tables) -> dict[str, str]:
    """Return the digests of a checkpoint's tables, without those of the best network.

    A run that validates after it was interrupted gets its best network later, so the records of
    validations have these tables.
    """
    names = [name for name in tables if not name.endswith(tuple(BEST))]
    nbytes = sum(np.asarray(a).nbytes for name in names for a in tables[name].values())
    if nbytes < LARGE:
        return {name: table_digest(name, tables[name]) for name in names}
    with ThreadPoolExecutor(len(names)) as threads:  # hashlib releases the interpreter's lock
        digests = threads.map(lambda name: table_digest(name, tables[name]), names)
        return dict(zip(names, digests, strict=True))


def table_digest(table: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Return the digest of a table of arrays."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        total.update(json.dumps([table, name, array.dtype.str, array.shape]).encode())
        total.update(np.ascontiguousarray(array))
    return total.hexdigest()


class BestDigests:
    """The digests of the best network so far, which are computed once for each network."""

    def __init__(self) -> None:
        self._best: Tables = {}
        self._digests: dict[str, str] = {}

    def digests_of(self, best: Tables) -> dict[str, str]:
        """Return {table: digest} of `Validation.best`.

        Each best network is a new dict. After a rollback, another network may be the best one of
        the same iteration.
        """
        if self._best is not best:
            self._best = best
            self._digests = {name: table_digest(name, arrays) for name, arrays in best.items()}
        return self._digests
