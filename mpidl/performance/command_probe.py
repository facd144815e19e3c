"""The probe of `python -m mpidl.scaling`, on the ranks that mpirun or srun started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from mpidl.cli import train_run
from mpidl.files import on_rank_0, write_whole
from mpidl.performance import probe
from mpidl.ranks import failure
from mpidl.ranks.world import World
from mpidl.training.files.folder_lock import FolderLock


def main(path: str, typed: Mapping[str, Any], seconds: float) -> int:
    """Measure the training steps that the arguments describe, and write the record. Collective.

    Parameters
    ----------
    path : str
        The JSON file to write.
    typed : mapping
        The result of `arguments.train`.
    seconds : float
        Approximate duration.
    """
    world = World(threads=None)
    with FolderLock(world) as lock:
        training = train_run.Training(typed, world, failure.Signals(), lock)
        training.resolve_options()
        training.open_data()
        training.build_network()
    images, options = training.sets.train, training.options
    show = partial(print, flush=True)
    record = probe.measure(world, training.net, images, options, seconds, show=show)
    on_rank_0(world, lambda: write_whole(path, json.dumps(record).encode()))
    return 0
