"""Answer a question once for the processes of a user on this host that ask it at the same time.

The first process to ask locks a file in the folder for temporary files, computes the answer, writes
it to the file and removes the file. The others have opened the same file and wait for the lock. The
processes need not know of each other: a process that asks alone, or too late, computes the answer.
A process that dies releases its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable

POLL_SECONDS = 0.005


def shared_answer(question: object, compute: Callable[[], str], patience: float) -> str:
    """Return the answer that one of the processes has computed.

    Parameters
    ----------
    question : object
        The question; its representation is the same in all processes.
    compute : callable
        Function that returns the answer, which is not empty.
    patience : float
        Seconds to wait for another process, such as one that is suspended.

    Returns
    -------
    str
        The answer.
    """
    digest = hashlib.sha256(repr(question).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    path = os.path.join(tempfile.gettempdir(), f"mpidl-{os.getuid()}-{digest}")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # no room, or the file of another user
        return compute()
    try:
        status = os.fstat(file)
        is_own = status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o600
        if not is_own or not _lock(file, patience):
            return compute()
        try:
            content = os.pread(file, 1 << 16, 0)
            if content:
                return content.decode("utf-8", "surrogateescape")
            answer = compute()
            with contextlib.suppress(OSError):
                os.pwrite(file, answer.encode("utf-8", "surrogateescape"), 0)
            return answer
        finally:
            with contextlib.suppress(OSError):  # another process has removed it
                os.unlink(path)
    finally:
        os.close(file)


def _lock(file, patience):
    """Lock an open file; return whether that succeeded in time."""
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
        except OSError:  # a file system without locks
            return False
        time.sleep(POLL_SECONDS)
