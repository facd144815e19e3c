"""Compute an answer once for all processes of a user on this host that request it simultaneously.

The first process locks a file in the folder for temporary files, computes the answer, writes the
answer to the file and removes the file. The other processes have opened the same file and wait for
the lock. The processes need no other communication: a process that makes its request alone or too
late computes the answer itself. If a process dies, the operating system releases its lock.
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
    """Return an answer, a string that must not be empty, that only one of several processes
    computes. The `repr` of the question must be the same in all processes. `patience` is the
    longest time in seconds to wait for another process, which may be suspended.
    """
    digest = hashlib.sha256(repr(question).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    try:
        path = os.path.join(tempfile.gettempdir(), f"mpidl-{os.getuid()}-{digest}")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # no folder, no space, or the file belongs to another user
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
                content = answer.encode("utf-8", "surrogateescape")
                if os.pwrite(file, content, 0) < len(content):
                    os.ftruncate(file, 0)
            return answer
        finally:
            _remove(path, status)
    finally:
        os.close(file)


def _remove(path, status):
    """Remove a locked file if `path` still names it, rather than a later file of another process.

    Only the process with the lock removes the file, so the name does not change between the calls.
    """
    with contextlib.suppress(OSError):  # another process has removed the file
        if os.path.samestat(os.stat(path, follow_symlinks=False), status):
            os.unlink(path)


def _lock(file, patience):
    """Lock an open file, and return whether locking succeeded within `patience` seconds."""
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
        except OSError:  # the file system has no locks
            return False
        time.sleep(POLL_SECONDS)
