"""Train many models at once on groups of ranks; a free group takes the next trial."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from mpidl.comm.transport import Cancelled
from mpidl.errors import Fault, UserError
from mpidl.files import on_rank_0, reason
from mpidl.ranks.failure import Signals
from mpidl.ranks.groups import Group
from mpidl.ranks.world import World

Trial = TypeVar("Trial")
Returned = TypeVar("Returned")

WAIT_SECONDS = 0.05  # time between two checks whether the trials of other groups have ended
STOP_SECONDS = 0.5  # time between two checks for a stop request from another group


def sweep(
    function: Callable[[Trial, World], Returned],
    trials: Iterable[Trial],
    *,
    ranks_per_model: int = 1,
    world: World | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> list[Returned | Exception]:
    """Call `function(trial, world)` for each trial, on groups of ranks that work concurrently.

    Collective over all ranks. Each group takes the next trial as soon as the group is free.

    Parameters
    ----------
    function : callable
        Function that is called with a trial and the `World` of a group, on each rank of the group.
        The function may train with `dl.train(..., world=world)`. Within the function, `dl.World()`
        also returns a world of the ranks of the group.
    trials : iterable
        The trials, such as dictionaries of options. All ranks must pass the same trials.
    ranks_per_model : int
        Number of consecutive ranks per group. This number must divide the number of ranks.
    world : World, optional
        The ranks to divide into groups. The default is all ranks of the job.
    folder : path, optional
        Existing folder, visible on all hosts, for the files through which the groups share the
        trials. The default is the system's temporary folder. If the ranks are on several hosts, the
        default is $MPIDL_CACHE, or ~/.cache/mpidl if this variable is not set.

    Returns
    -------
    list
        One element per trial, in the order of the trials; the same on all ranks. The element is the
        value that the function returned on rank 0 of the group, which must be picklable. If the
        trial failed, the element is the exception. If a signal (USR1, TERM, INT) stopped the sweep
        before the trial started, the element is a `Fault`.

    Raises
    ------
    UserError
        If `ranks_per_model` does not divide the number of ranks, or if the folder cannot be used.
    """
    world = World() if world is None else world
    trials, outcomes = list(trials), {}
    group = Group(world, ranks_per_model)

    def attempt(index):
        def call(group_world):
            try:
                result = function(trials[index], group_world)
                if group.is_leader:
                    pickle.dumps(result)  # raise here, so that only this trial fails
                return result if group.is_leader else None
            except Exception as error:
                print_traceback(error)
                raise

        return group.attempt(call, lambda error: None)

    with Signals() as signals:
        for index, outcome in run(len(trials), attempt, group, signals, folder):
            outcomes[index] = outcome.value if outcome.error is None else outcome.error
    group.close()
    results: dict[int, Any] = {}
    for part in world.allgather(outcomes if group.is_leader else {}):
        results.update(part)
    stopped = Fault("the sweep was stopped before this trial")
    return [results.get(index, stopped) for index in range(len(trials))]


def run(
    count: int,
    attempt: Callable[[int], Returned],
    group: Group,
    signals: Signals,
    folder: str | os.PathLike[str] | None = None,
    needs: Callable[[int], Iterable[int]] = lambda index: (),
) -> Iterator[tuple[int, Returned]]:
    """Share trials among groups, and yield each trial of this group when it ends.

    Collective over all ranks of the job. The iterator ends on all ranks when all groups have ended.

    Parameters
    ----------
    count : int
        Number of trials.
    attempt : callable
        Function that all ranks of a group call with the number of a trial, counted from 0.
    group : Group
        The group of this rank.
    signals : Signals
        The requests to stop. If any rank has received a request, no group starts another trial, and
        the first rank of each group receives the signal USR1.
    folder : path, optional
        Folder for the files through which the groups share the trials, as in `sweep`.
    needs : callable, optional
        Function that returns the numbers of the earlier trials that must end before a trial starts.
        A group that has taken such a trial waits for them.

    Yields
    ------
    index : int
        Number of the trial, from 0.
    result : object
        The value that `attempt` returned.
    """
    with _claims_folder(group.job, folder) as claims, _stops(claims, group, signals) as stop_path:
        for index in range(count):
            is_stopping = group.is_leader and os.path.exists(stop_path)
            # The file of a claimed trial exists.
            claimed = group.is_leader and not is_stopping and _touch(f"{claims}/{index}")
            if group.ranks.broadcast(claimed):
                ends = [f"{claims}/{other}.ended" for other in needs(index)]
                if _wait_for(ends, group, signals, stop_path):
                    yield index, attempt(index)
                if group.is_leader:
                    _touch(f"{claims}/{index}.ended")
            if group.any(_is_stopping(signals)):
                if group.is_leader:
                    _touch(stop_path)
                break
        group.wait_for_job()


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an unexpected exception to stderr."""
    if not isinstance(error, (UserError, Fault, Cancelled)):
        traceback.print_exception(error)


def _wait_for(paths, group, signals, stop_path):
    """Wait until all files exist, and return True; return False after a request to stop."""
    while paths:
        if group.any(_is_stopping(signals) or (group.is_leader and os.path.exists(stop_path))):
            return False
        if group.ranks.broadcast(group.is_leader and all(map(os.path.exists, paths))):
            break
        time.sleep(WAIT_SECONDS)
    return True


def _is_stopping(signals):
    return signals.agreed or signals.name is not None


@contextlib.contextmanager
def _claims_folder(world, parent):
    """Create a folder for the files that record which trials the groups have claimed.

    Each claimed trial has a file. Messages are not used, because in many MPI libraries a message
    arrives only while its receiver calls MPI.
    """
    if parent is None and len(set(world.hosts)) > 1:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        parent = os.environ.get("MPIDL_CACHE") or os.path.join(cache, "mpidl")

    def make():
        try:
            if parent is not None:
                os.makedirs(parent, exist_ok=True)
            return tempfile.mkdtemp(prefix=".claims-", dir=parent)
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be written: {reason(error)}") from error

    folder = on_rank_0(world, make)
    lacking = [h for h in world.allgather("" if os.path.isdir(folder) else world.host) if h]
    try:
        if lacking:
            raise UserError(f"{folder}: expected a folder on all hosts, found none on {lacking[0]}")
        yield folder
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _touch(path):
    """Create an empty file; return False if the file already exists."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        return True
    except FileExistsError:
        return False
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {reason(error)}") from error


@contextlib.contextmanager
def _stops(folder, group, signals):
    """Within the block, pass stop requests between the groups through a file; yield its path.

    The first rank of each group runs a thread. The thread creates the file if its rank has received
    a request. If another group has created the file, the thread sends USR1 to its own process.
    """
    path, is_over = os.path.join(folder, "stop"), threading.Event()

    def watch():
        while not is_over.wait(STOP_SECONDS):
            if _is_stopping(signals):
                with contextlib.suppress(UserError):  # the next claim of a trial raises this error
                    _touch(path)
            elif os.path.exists(path):
                os.kill(os.getpid(), signal.SIGUSR1)

    watcher = threading.Thread(target=watch, name="mpidl-sweep-stops", daemon=True)
    has_handlers = threading.current_thread() is threading.main_thread()
    if group.is_leader and has_handlers:  # without a handler, USR1 would end the process
        watcher.start()
    try:
        yield path
    finally:
        is_over.set()
        if watcher.ident is not None:
            watcher.join()
