"""Lock the folder of a run for all ranks of the run; only rank 0 accesses the lock file."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from mpidl.errors import FolderInUse, UserError
from mpidl.files import call_together, on_rank_0, reason
from mpidl.report import stop_file
from mpidl.training.files import lock_file
from mpidl.training.files.lock_file import LockFile
from mpidl.training.files.lock_holder import Holder

if TYPE_CHECKING:
    from mpidl.ranks.world import World

POLL_SECONDS = 0.5  # time between two attempts to take the lock


class FolderLock:
    """Context manager that holds the lock of a run's folder from `take` to the end of the block.

    A thread on rank 0 renews the lock. Leaving the block is not a collective operation.

    Parameters
    ----------
    world : World
        The ranks of the run.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._file: LockFile | None = None  # None on the other ranks
        self._is_taken = False
        self._folder: str | os.PathLike[str] = ""
        self._token: str | None = None  # token of the lock's holder
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="mpidl lock", daemon=True)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._is_over.set()
            self._thread.join()
            self._file.release()

    def take(
        self, folder: str | os.PathLike[str], spelled: str = "out={}", create: bool = True
    ) -> None:
        """Take the lock of a folder, unless this object already holds a lock. Collective.

        If the lock belongs to a process on another machine that may have ended, wait until the lock
        is renewed or free.

        Parameters
        ----------
        folder : path
            The folder.
        spelled : str
            Template of the argument that sets the folder, for error messages.
        create : bool
            Whether to create a missing folder. If false, a missing folder is not locked.

        Raises
        ------
        UserError
            On all ranks, if the folder is in use or cannot be written to.
        """
        if self._is_taken:
            return
        if not create and not on_rank_0(self.world, lambda: os.path.isdir(folder)):
            return
        file, is_announced = LockFile(folder, Holder.current(), self._token), False
        while (holder := on_rank_0(self.world, lambda: self._attempt(file, spelled))) is not None:
            if self.world.rank == 0 and not is_announced:
                print(
                    f"mpidl: {file.folder} is locked by {holder}, which may have ended: waiting "
                    f"up to {lock_file.STALE_SECONDS:g} s to see whether it still runs",
                    file=sys.stderr,
                    flush=True,
                )
                is_announced = True
        self._is_taken, self._folder = True, folder
        self._token = self.world.broadcast(file.holder.token)

    def take_over(self) -> None:
        """Let rank 0 take the lock if the rank that held the lock was lost. Collective.

        The loss of another rank may have interrupted an earlier call of this method.
        """
        if self._folder:
            self._is_taken = self.world.broadcast(self._file is not None)
            self.take(self._folder)
            self._token = self.world.broadcast(self._file and self._file.holder.token)

    def _attempt(self, file, spelled):
        """Try to take the lock. Return None, or a description of a holder that may have ended."""
        option = spelled.format(file.folder)
        try:
            os.makedirs(file.folder, exist_ok=True)
            entry = file.attempt()
        except FolderInUse as error:
            raise FolderInUse(
                f"{option}: in use by {error}; wait until it ends, write {stop_file.NOW} to "
                f"{os.path.join(file.folder, stop_file.NAME)} to end it with a checkpoint, or "
                "choose another folder"
            ) from None
        except OSError as error:
            raise UserError(f"{option}: cannot be written: {reason(error)}") from error
        if entry is not None:
            time.sleep(POLL_SECONDS)
            return entry.description
        self._file = file
        self._thread.start()
        return None

    def check(self, seconds: float = 0.0) -> None:
        """Raise LostLock on rank 0 if another process has taken over the folder.

        Parameters
        ----------
        seconds : float
            Read the lock file only if the last read was at least this many seconds ago.
        """
        if self._file is not None:
            self._file.check(seconds)

    def confirm(self) -> None:
        """Raise LostLock on all ranks if another process has taken over the folder. Collective."""
        call_together(self.world, self.check)

    @property
    def claim(self) -> tuple[str, str] | None:
        """The locked folder and the token of the lock's holder; None without a lock."""
        return None if self._token is None else (os.fspath(self._folder), self._token)

    @property
    def is_lost(self) -> bool:
        """Whether rank 0 has noticed that another process took over the folder.

        Always False on other ranks.
        """
        return self._file is not None and self._file.is_lost

    def _renew(self):
        while not self._is_over.wait(lock_file.RENEW_SECONDS):
            if self._file is not None:
                self._file.renew()
