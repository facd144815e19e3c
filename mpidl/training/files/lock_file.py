"""Lock a folder with a lock file, so that only one job at a time writes to the folder.

The lock must work on any file system that nodes share. Locks of the operating system (flock) often
apply to one node only, so the existence of the file is the lock:

- A process takes the lock with `link`, which creates the file with its content in one step and
  fails if the file exists.
- The holder of the lock renews it by updating the file's modification time. The clocks of two nodes
  are never compared. Any change to the modification time counts as a renewal, and the age of the
  lock is measured relative to a file that was just written in the same folder.
- To take over the lock of a holder that has ended, a process first creates a claim file, whose name
  contains the holder's token. Only one process can create this file. If that process ends too,
  another process takes over its claim in the same way.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from typing import NamedTuple

from mpidl.errors import FolderInUse, LostLock
from mpidl.training.files.lock_holder import Holder

NAME = "run.lock"
RENEW_SECONDS = 5.0  # time between two renewals
# A lock held on another machine counts as free if its file has not changed for this time.
STALE_SECONDS = 60.0
# Shortest time for which a process watches a lock held on another machine, even if the file is old.
WATCH_SECONDS = 3 * RENEW_SECONDS
MAX_BYTES = 4096
# Errors of file systems without hard links.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
LEFTOVER = re.compile(rf"\.{re.escape(NAME)}\.[0-9a-f]+\.(part|claim)")


class Entry(NamedTuple):
    """Content of a lock file: the holder (None if unreadable), its token, and the file's time."""

    holder: Holder | None
    token: str
    written: float  # modification time of the file, in seconds

    @property
    def description(self) -> str:
        return self.holder.describe() if self.holder else "a process that cannot be identified"


class LockFile:
    """The lock of a folder, for a process that wants or holds the lock.

    Parameters
    ----------
    folder : path
        An existing folder.
    holder : Holder
        A description of this process.
    predecessor : str, optional
        Token of a holder that is known to have ended.

    Attributes
    ----------
    path : str
        Path of the lock file.
    is_lost : bool
        Whether this process took the lock, and the lock was then removed or taken over.
    """

    def __init__(
        self, folder: str | os.PathLike[str], holder: Holder, predecessor: str | None = None
    ) -> None:
        self.folder, self.holder, self._predecessor = os.fspath(folder), holder, predecessor
        self.path = os.path.join(self.folder, NAME)
        self.is_lost = False
        self._confirm_time = 0.0
        self._first_looks: dict[str, tuple[float, float]] = {}

    def attempt(self) -> Entry | None:
        """Try to take the lock.

        Returns
        -------
        Entry or None
            None if this process now holds the lock. Otherwise the entry of a process on another
            machine that may have ended. The caller should try again until the method raises
            FolderInUse because that process has renewed the lock, or until the lock is free.

        Raises
        ------
        FolderInUse
            If another process holds the lock.
        OSError
            If the folder cannot be written to.
        """
        start_time = time.monotonic()
        with self._part(self.holder) as part:
            now = os.stat(part).st_mtime
            while not self._create(self.path, part, self.holder):
                chain, is_free = self._chain(part, now)
                if chain and not is_free:
                    return chain[-1]
                if chain and self._succeed(chain, part):
                    break
            self._confirm_time = start_time
            self._remove_leftovers(now)
        return None

    def _chain(self, part, now):
        """Return the entries of the holder and all claims, and whether the last process has ended.

        If the process of the last entry has ended, this process has claimed the lock. An empty list
        means that the lock changed in the meantime.
        """
        chain, path = [], self.path
        while (entry := self._read(path)) is not None:
            chain.append(entry)
            if not self._is_free(entry, now):
                return chain, False
            path = self._claim_of(entry.token)
            if self._create(path, part, self.holder):
                return chain, True
        return [], False

    def _is_free(self, entry, now):
        """Return whether the process of an entry has ended, or False if that is not yet known.

        Raises FolderInUse if the process is running.
        """
        if entry.holder is not None:
            is_alive = entry.token != self._predecessor and entry.holder.is_alive()
            if self.holder.follows(entry.holder) or is_alive is False:
                return True
            if is_alive:
                raise FolderInUse(entry.description)
        monotonic = time.monotonic()
        written, look_time = self._first_looks.setdefault(entry.token, (entry.written, monotonic))
        if written != entry.written:
            raise FolderInUse(entry.description)
        is_old = now - written >= STALE_SECONDS
        return monotonic - look_time >= (WATCH_SECONDS if is_old else STALE_SECONDS)

    def _succeed(self, chain, part):
        """Make this process the holder, unless the lock has changed since the chain was read."""
        tokens = [entry.token for entry in chain]
        paths = [self.path, *map(self._claim_of, tokens)]
        entries = [self._read(path) for path in paths]
        is_intact = [entry and entry.token for entry in entries] == [*tokens, self.holder.token]
        if is_intact:
            os.replace(part, self.path)
        for path in paths[1:] if is_intact else paths[-1:]:
            _remove(path)
        return is_intact

    def renew(self) -> None:
        """Renew the lock, or set `is_lost`. If the file cannot be accessed, do nothing."""
        start_time = time.monotonic()
        try:
            with _opened(self.path) as descriptor:
                entry = _entry(descriptor)
                if entry.token == self.holder.token:
                    os.utime(descriptor)
        except FileNotFoundError:
            self.is_lost = True
        except OSError:
            return
        else:
            self.is_lost = self.is_lost or entry.token != self.holder.token
        self._confirm_time = start_time

    def check(self, seconds: float = 0.0) -> None:
        """Raise LostLock if this process no longer holds the lock.

        Parameters
        ----------
        seconds : float
            Read the file only if the last read was at least this many seconds ago.
        """
        if not self.is_lost and time.monotonic() - self._confirm_time >= seconds:
            self.renew()
        if self.is_lost:
            raise _lost(self.path)

    def release(self) -> None:
        """Remove the lock if this process still holds it. Never raises OSError."""
        remover = self.holder.renamed()  # a claim needs a token other than the holder's
        claim = self._claim_of(self.holder.token)
        try:
            with self._part(remover) as part:
                if not self._create(claim, part, remover):
                    return  # another process has claimed the lock and will take it over
        except OSError:  # such as on a full disk, where other processes cannot create claims either
            self._remove_own()
        else:
            self._remove_own()
            _remove(claim)

    def _remove_own(self):
        with contextlib.suppress(OSError):
            entry = self._read(self.path)
            if entry is not None and entry.token == self.holder.token:
                os.unlink(self.path)

    def _claim_of(self, token):
        return os.path.join(self.folder, f".{NAME}.{token}.claim")

    @contextlib.contextmanager
    def _part(self, holder):
        """Write a file that describes a holder, and remove the file at the end of the block."""
        path = os.path.join(self.folder, f".{NAME}.{holder.token}.part")
        try:
            _write(path, holder)
            yield path
        finally:
            _remove(path)

    @staticmethod
    def _create(path, part, holder):
        """Create a file with the content of `part`; return False if the file already exists."""
        try:
            os.link(part, path)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError), _opened(path) as descriptor:
                # A file server that repeats a request may find the link that it has just created.
                return _entry(descriptor).token == holder.token
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            try:
                _write(path, holder)
            except FileExistsError:
                return False
        return True

    @staticmethod
    def _read(path):
        """Return the Entry of a lock or claim file; None if the file does not exist."""
        try:
            with _opened(path) as descriptor:
                return _entry(descriptor)
        except FileNotFoundError:
            return None

    def _remove_leftovers(self, now):
        """Remove the files of processes that were killed while taking or removing the lock."""
        for name in os.listdir(self.folder):
            path = os.path.join(self.folder, name)
            if LEFTOVER.fullmatch(name):
                with contextlib.suppress(OSError):
                    if now - os.stat(path).st_mtime > STALE_SECONDS:
                        _remove(path)


def confirm(folder: str | os.PathLike[str], token: str) -> None:
    """Raise LostLock unless the holder with this token has the lock of the folder.

    If the lock file cannot be accessed, do nothing.
    """
    path = os.path.join(folder, NAME)
    try:
        entry = LockFile._read(path)
    except OSError:
        return
    if entry is None or entry.token != token:
        raise _lost(path)


def _lost(path):
    """Return a LostLock error that says who has the lock, or that the lock was removed."""
    entry = LockFile._read(path)
    cause = f"{entry.description} holds it" if entry else "the file has been removed"
    return LostLock(
        f"{path}: this run has lost its lock: {cause}; the run stops and writes nothing more to "
        "the folder"
    )


@contextlib.contextmanager
def _opened(path):
    """Open a file for reading. On NFS, this also fetches the file's current times."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _entry(descriptor):
    status = os.fstat(descriptor)
    holder = Holder.parse(os.read(descriptor, MAX_BYTES))
    token = holder.token if holder else f"{status.st_ino:x}"
    return Entry(holder, token, status.st_mtime)


def _write(path, holder):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):  # some file systems have no modes
            os.fchmod(descriptor, 0o644)  # whatever the umask, other users must be able to read it
        os.write(descriptor, holder.content())
    except OSError:
        _remove(path)
        raise
    finally:
        os.close(descriptor)


def _remove(path):
    with contextlib.suppress(OSError):
        os.unlink(path)
