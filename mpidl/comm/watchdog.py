"""A thread that ends the job if MPI does not return to the main thread, or the launcher has ended.

A wait of `Transport` is a loop that notices by itself that it takes too long. A call of MPI may
block inside MPI, for example if a rank is stopped while all ranks split a communicator. Only
another thread can notice that. The watchdog thread does not call MPI. It ends this process, and the
launcher then ends the job. It also ends a rank whose launcher was killed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator

from mpidl.comm import acts, failure

SECONDS = 0.25  # time between two looks
LONGEST_STEP = 1.0  # if more time passes between two looks, all processes were suspended
TURN = 0.15  # seconds that a rank waits per lower rank, so that the lowest prints the message
MAX_TURNS = 6

Describe = Callable[[str, float], str]


class Watchdog:
    """Watches the main thread.

    Parameters
    ----------
    record : ActRecord
        Record of what the main thread does.
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
        """Look at the main thread until the process ends."""
        previous = time.monotonic()
        while True:
            time.sleep(SECONDS)
            now = time.monotonic()
            self.look(min(now - previous, LONGEST_STEP))
            previous = now

    def look(self, seconds: float) -> None:
        """End the process if the current operation exceeds its limit, or the launcher has ended.

        Parameters
        ----------
        seconds : float
            Time since the previous look.
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
        with contextlib.suppress(OSError):  # the reader of stderr may have ended, too
            print(message, file=sys.stderr, flush=True)
        self._end(1)


def _process():
    return f"mpidl: process {os.getpid()} on host {platform.node()}"


def _describe(operation, limit):
    return f"{_process()}: {operation} did not complete within {limit:g} s"


_watchdog: Watchdog | None = None


def start(rank: int, describe: Describe = _describe) -> None:
    """Start the thread once per process, and describe the ranks by `describe` from now on."""
    global _watchdog
    if _watchdog is None:
        _watchdog = Watchdog(acts.record())
        threading.Thread(target=_watchdog.run, name="mpidl watchdog", daemon=True).start()
    _watchdog.rank, _watchdog.describe = rank, describe


@contextlib.contextmanager
def guard(operation: str, seconds: float) -> Iterator[None]:
    """End the process if a block of calls of MPI does not return, once the thread runs.

    Parameters
    ----------
    operation : str
        Name of the calls, for the message.
    seconds : float
        The time that they may take.
    """
    record = acts.record()
    outer = record.begin(operation, seconds)
    try:
        yield
    finally:
        record.end(outer)
