"""Run a thread that ends the process if MPI blocks the main thread or if the launcher has ended.

A wait in `Transport` is a loop that checks its own time-out. In contrast, other MPI calls may block
inside MPI, for example if a rank is stopped while all ranks split a communicator. Only another
thread can detect such a block. The watchdog thread does not call MPI. It ends this process, after
which the launcher ends the job. The thread also ends the process if its launcher was killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator

from mpidl.ranks import acts, failure

SECONDS = 0.25  # time between two checks
LONGEST_STEP = 1.0  # if more time passes between two checks, all processes were suspended
# To let the lowest rank print the message, rank n waits n * TURN seconds, at most MAX_TURNS * TURN.
TURN = 0.15
MAX_TURNS = 6

Describe = Callable[[str, float], str]


class Watchdog:
    """Watches the operations of the main thread.

    Parameters
    ----------
    record : ActRecord
        Record of what the main thread is doing.
    end : callable
        ``end(1)`` ends this process.

    Attributes
    ----------
    rank : int
        Rank of this process.
    describe : callable
        ``describe(operation, limit)`` returns the message about an operation in which MPI has
        blocked for `limit` seconds.
    """

    def __init__(self, record: acts.ActRecord, end: Callable[[int], object] = os._exit) -> None:
        self.record, self._end = record, end
        self.rank = 0
        self.describe: Describe = _describe
        self._count, self._seconds = -1, 0.0

    def run(self) -> None:
        """Check the main thread periodically until the process ends."""
        previous = time.monotonic()
        while True:
            time.sleep(SECONDS)
            now = time.monotonic()
            self.look(min(now - previous, LONGEST_STEP))
            previous = now

    def look(self, seconds: float) -> None:
        """End the process if the current operation exceeds its limit or if the launcher has ended.

        Parameters
        ----------
        seconds : float
            Time since the previous check.
        """
        if failure.launcher_has_ended():
            self._end_with(f"{_process()}: the launcher on this host has ended")
        operation, limit, count = self.record.operation, self.record.limit, self.record.count
        if operation is None or count != self._count:
            self._count, self._seconds = count, 0.0
            return
        self._seconds += seconds
        if self._seconds < limit:
            return
        time.sleep(TURN * min(self.rank, MAX_TURNS))
        if self.record.count == count:
            self._end_with(self.describe(operation, limit))

    def _end_with(self, message):
        with contextlib.suppress(OSError):  # the process that reads stderr may have ended too
            print(message, file=sys.stderr, flush=True)
        self._end(1)


def _process():
    return f"mpidl: process {os.getpid()} on host {platform.node()}"


def _describe(operation, limit):
    return f"{_process()}: {operation} did not complete within {limit:g} s"


@functools.cache
def _running():
    """Return the watchdog of this process; the first call starts its thread."""
    watchdog = Watchdog(acts.record())
    threading.Thread(target=watchdog.run, name="mpidl watchdog", daemon=True).start()
    return watchdog


def start(rank: int, describe: Describe = _describe) -> None:
    """Start the thread if it is not running, and set the rank and the function for messages."""
    watchdog = _running()
    watchdog.rank, watchdog.describe = rank, describe


@contextlib.contextmanager
def guard(operation: str, seconds: float) -> Iterator[None]:
    """Let the watchdog end the process if the MPI calls in the `with` block do not return in time.

    Parameters
    ----------
    operation : str
        Name of the operation, for the message.
    seconds : float
        Longest time that the block may take.
    """
    record = acts.record()
    outer = record.begin(operation, seconds)
    try:
        yield
    finally:
        record.end(outer)
