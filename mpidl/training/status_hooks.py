"""Report the state of a run in status.json, and obey requests in the file `stop`."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from mpidl.comm import World, survival
from mpidl.comm.failure import Signals
from mpidl.comm.groups import describe
from mpidl.errors import LostLock, UserError
from mpidl.files import call_together
from mpidl.report import status, stop_file
from mpidl.training.files import lock_file
from mpidl.training.files.run_lock import RunLock
from mpidl.training.progress import EpochSummary

if TYPE_CHECKING:
    from mpidl.training.trainer import Trainer


@contextlib.contextmanager
def watched(
    folder: str | os.PathLike[str] | None, world: World, signals: Signals, lock: RunLock
) -> Iterator[None]:
    """Within the block, let the file `stop` request a stop of the run, as a signal does.

    The loss of the lock requests a stop, too. The run then ends when it would write a checkpoint.

    Only rank 0 looks for the file. The start of the block removes the file of an earlier job, and
    its end removes the file of this job. If the caller's block already watches for the same
    signals, nothing changes.

    Parameters
    ----------
    folder : path or None
        Folder of the run.
    world : World
        The ranks of the run.
    signals : Signals
        Requests to stop the run.
    lock : RunLock
        The lock of the folder.
    """
    if folder is None or signals.look is not None:
        yield
        return
    file = StopFile(folder, world)
    file.remove()
    signals.look = lambda: lock_file.NAME if lock.is_lost else file.look()
    try:
        yield
    finally:
        signals.look = None
        if not lock.is_lost:
            file.remove()


class StopFile:
    """The file `stop` in the folder of a run.

    Parameters
    ----------
    folder : path
        Folder of the run.
    world : World
        The ranks of the run. The methods do nothing on ranks other than 0.
    """

    def __init__(self, folder: str | os.PathLike[str], world: World) -> None:
        self.folder, self.world, self.look_time = folder, world, -math.inf

    def remove(self) -> None:
        """Remove the file, which belongs to an earlier job or to this job at its end."""
        if self.world.rank == 0:
            stop_file.remove(self.folder)

    def look(self) -> str | None:
        """Return the reason to stop now, or None; read at most once per `stop_file.SECONDS`."""
        now = time.monotonic()
        if self.world.rank or now - self.look_time < stop_file.SECONDS:
            return None
        self.look_time = now
        return stop_file.REASON if stop_file.read(self.folder) == stop_file.NOW else None


class StopFileHook:
    """Stops the run after an epoch, if the file `stop` requests that."""

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        out, signals = trainer.writer.out, trainer.signals
        if trainer.world.rank or out is None or trainer.is_over:
            return
        if stop_file.read(out) == stop_file.EPOCH:
            signals.name = signals.name or stop_file.REASON


class StatusHook:
    """Writes status.json when a run begins, when it ends, and if it fails.

    The `with` block of the hook is the run; the command's block includes the test. The methods are
    collective, except for the exit after an exception.

    Parameters
    ----------
    folder : path
        Folder of the run.
    world : World
        The ranks of the run.
    lock : RunLock
        The lock of the folder.

    Attributes
    ----------
    status : Status
        The content of the file.
    """

    def __init__(self, folder: str | os.PathLike[str], world: World, lock: RunLock) -> None:
        self.folder, self.world, self.lock = folder, world, lock
        self.status = status.Status()

    def __enter__(self) -> StatusHook:
        self._write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.status.state = status.FINISHED
            survival.attempt(self.world, self._write, self.lock.take_over)
        elif self.world.rank == 0:
            text = describe(error).encode("utf-8", "backslashreplace").decode()
            self.status.state, self.status.error = status.FAILED, text
            with contextlib.suppress(UserError, LostLock):  # the run's own error is the one to show
                self.lock.check()
                status.write(self.folder, self.status)

    def lost(self, trainer: Trainer) -> None:
        self._write()

    def start(self, trainer: Trainer) -> None:
        self.status.epochs = trainer.options.epochs
        self.status.iterations_per_epoch = len(trainer.queue)
        self.status.iterations = int(trainer.total_iterations)
        self._write()

    def end(self, trainer: Trainer) -> None:
        self.status.stopped = trainer.stopped

    def _write(self):
        self.status.ranks, self.status.host = self.world.size, self.world.hosts[0]
        self.status.lost_ranks = len(self.world.lost_ranks)

        def write():
            self.lock.check()
            status.write(self.folder, self.status)

        call_together(self.world, write if self.world.rank == 0 else lambda: None)


def of_run(
    hooks: Iterable[object], folder: str | os.PathLike[str] | None, world: World, lock: RunLock
) -> StatusHook | None:
    """Return a StatusHook; None if the run has no folder, or if `hooks` contains such a hook."""
    if folder is None or any(isinstance(hook, StatusHook) for hook in hooks):
        return None
    return StatusHook(folder, world, lock)
