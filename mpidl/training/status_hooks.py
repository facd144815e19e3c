"""Write the state of a run to status.json, and stop the run if the file `stop` requests it."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from mpidl.errors import LostLock, UserError, describe
from mpidl.files import call_together
from mpidl.ranks import survival
from mpidl.report import status, stop_file
from mpidl.training.files import lock_file
from mpidl.training.files.folder_lock import FolderLock
from mpidl.training.progress import EpochSummary

if TYPE_CHECKING:
    from mpidl.ranks.failure import Signals
    from mpidl.ranks.world import World
    from mpidl.training.trainer import Trainer


@contextlib.contextmanager
def watched(
    folder: str | os.PathLike[str] | None, world: World, signals: Signals, lock: FolderLock
) -> Iterator[None]:
    """Within the block, let the file `stop` end the run as a signal does.

    The run also stops if it loses the lock of its folder. In that case, it writes no checkpoint.

    Only rank 0 looks for the file. The file of an earlier job is removed at the start of the block,
    and the file of this job at the end. If an outer block already watches on behalf of `signals`,
    this block does nothing.

    Parameters
    ----------
    folder : path or None
        Folder of the run. None if the run has no folder; there is then no file to watch.
    world : World
        The ranks of the run.
    signals : Signals
        The requests to stop the run.
    lock : FolderLock
        The lock of the folder.
    """
    if folder is None or signals.look is not None:
        yield
        return
    look_time = -math.inf

    def look():
        nonlocal look_time
        if lock.is_lost:
            return lock_file.NAME
        now = time.monotonic()
        if world.rank or now - look_time < stop_file.SECONDS:
            return None
        look_time = now
        return stop_file.REASON if stop_file.read(folder) == stop_file.NOW else None

    def remove():
        if world.rank == 0 and not lock.is_lost:
            stop_file.remove(folder)

    remove()
    signals.look = look
    try:
        yield
    finally:
        signals.look = None
        remove()


def stop_after_epoch(folder: str | os.PathLike[str], signals: Signals) -> None:
    """At the end of an epoch, request a stop if the file `stop` asks for it."""
    if stop_file.read(folder) == stop_file.EPOCH:
        signals.name = signals.name or stop_file.REASON


class StopFileHook:
    """Stops the run after an epoch if the file `stop` requests that."""

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        out = trainer.writer.out
        if trainer.world.rank == 0 and out is not None and not trainer.is_over:
            stop_after_epoch(out, trainer.signals)


class StatusHook:
    """Writes status.json when a run begins, when it ends, and if it fails.

    The hook is also a context manager: its `with` block encloses the run. In the command `train`,
    the block also includes the test. All methods are collective, except for `__exit__` after an
    exception.

    Parameters
    ----------
    folder : path
        Folder of the run.
    world : World
        The ranks of the run.
    lock : FolderLock
        The lock of the folder.

    Attributes
    ----------
    status : Status
        The content of the file.
    """

    def __init__(self, folder: str | os.PathLike[str], world: World, lock: FolderLock) -> None:
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
            with contextlib.suppress(UserError, LostLock):  # show the error of the run instead
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
    hooks: Iterable[object], folder: str | os.PathLike[str] | None, world: World, lock: FolderLock
) -> StatusHook | None:
    """Return a StatusHook, or None if the run has no folder or `hooks` contains a StatusHook."""
    if folder is None or any(isinstance(hook, StatusHook) for hook in hooks):
        return None
    return StatusHook(folder, world, lock)
