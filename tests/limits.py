"""Limit the time of tests, scaled by the machine's speed, and print the stacks of hanging tests.

The limits are pytest-timeout's: `timeout` in pyproject.toml, or `@pytest.mark.timeout(seconds)`.
Limits are in seconds on an idle machine. When a limit expires, this module measures the machine's
speed. On a machine three times slower, a test gets three times as long. A whole run has no limit.

In a single process, a test past its limit fails at its current line, and the next test runs. Under
mpirun, one rank names the test, prints the stack of every rank and ends the job.
"""

import faulthandler
import hashlib
import math
import mmap
import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

REFERENCE = 500e6  # BLAKE2b hashing speed of a core of the reference machine, in bytes per second
TEARDOWN = 10  # minimum time in seconds for the fixtures' teardown after a limit expired
GRACE = 30  # seconds until faulthandler ends a process that ignores the alarm


def slowness(seconds: float = 0.3) -> float:
    """Return how many times slower a core currently is than the reference, at least 1.

    Other work on the machine and a CPU quota slow this measurement as much as the tests.
    """
    chunk, hashed, start = bytes(1 << 16), 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        hashlib.blake2b(chunk)  # releases the interpreter's lock
        hashed += len(chunk)
    return max(1.0, REFERENCE * elapsed / hashed)


def exceeded(start: float, seconds: float) -> bool:
    """Return whether the time since `start` is more than `seconds` seconds on an idle machine.

    `start` is a value of time.monotonic().
    """
    elapsed = time.monotonic() - start
    return elapsed > seconds and elapsed > seconds * slowness()


def wait_until(condition, seconds: float = 0.01) -> None:
    """Wait until condition() is true, calling it every `seconds` seconds.

    The test's time limit ends a wait that never succeeds.
    """
    while not condition():
        time.sleep(seconds)


def without_pytest(stacks: str) -> str:
    """Remove pytest's frames below a test from the stacks that faulthandler wrote."""
    package = r'[^"\n]*/(_pytest|pytest|pluggy|xdist|execnet)/[^"\n]*'
    return re.sub(rf'  File "({package}|<frozen runpy>)", [^\n]*\n', "", stacks)


def settled(value, expected) -> bool:
    """Wait until value() is `expected`. Return whether it is still `expected` a moment later."""
    wait_until(lambda: value() == expected)
    time.sleep(0.02)
    return value() == expected


class Alarm:
    """The time limit of tests in a single process: a late test fails, and the next test runs."""

    def __init__(self):
        self.stderr = os.dup(2)  # before pytest captures it
        signal.signal(signal.SIGALRM, self._expire)
        self.start, self.limit = 0.0, 0.0

    def set(self, item, limit):
        self.start, self.limit = time.monotonic(), limit
        self._arm(limit)

    def cancel(self):
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()

    def _arm(self, seconds):
        # A process that stays in C code never calls _expire(). In this case, faulthandler's thread
        # ends the process and prints its stack.
        faulthandler.dump_traceback_later(3 * seconds + GRACE, exit=True, file=self.stderr)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _expire(self, number, frame):
        limit = self.limit * slowness()
        elapsed = time.monotonic() - self.start
        if elapsed < limit:
            self._arm(limit - elapsed)
            return
        # The limit starts again for the teardown, which may have to end a job.
        self.start, self.limit = time.monotonic(), max(self.limit, TEARDOWN)
        self._arm(self.limit)
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = without_pytest(file.read())
        pytest.fail(f"did not end within its limit of {limit:.0f} s; all threads:\n{stacks}")


class Watch:
    """The time limit of tests under mpirun, if all ranks are on this host.

    Each rank writes the number of its current test to a table in memory shared by all ranks. The
    first rank whose limit expires names the test that the other ranks wait for, lets every rank
    write its stack, and ends the job.
    """

    POSITION, START, LIMIT, PID = range(4)

    def __init__(self, folder: Path, rank: int, size: int, barrier):
        self.folder, self.rank, self.size = folder, rank, size
        self.stderr = os.fdopen(os.dup(2), "w")
        self.names = {-1: "collection"}
        path = folder / "positions"
        if rank == 0:
            path.write_bytes(bytes(8 * 4 * size))
        barrier()
        with open(path, "r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0))
        self.table = memory.cast("d", (size, 4))
        self.table[rank, self.PID] = os.getpid()
        self.stack = open(folder / f"stack-{rank}", "w")
        faulthandler.register(signal.SIGUSR2, self.stack, all_threads=True)
        self.enter(-1, 60)
        threading.Thread(target=self._watch, daemon=True).start()

    def number(self, items):
        """Set the list of tests, which is the same on all ranks. A position is an index in it."""
        self.names |= {i: item.nodeid for i, item in enumerate(items)}
        self.names[len(items)] = "the end of the run"
        self.positions = {item: i for i, item in enumerate(items)}
        self.cancel()

    def enter_last(self):
        """Set this rank's position to the end of the run, where ranks wait for each other."""
        self.enter(len(self.positions), 60)

    def set(self, item, limit):
        self.enter(self.positions[item], limit)

    def cancel(self):
        self.table[self.rank, self.LIMIT] = math.inf

    def enter(self, position, limit):
        for column, value in enumerate((position, time.monotonic(), limit)):
            self.table[self.rank, column] = value

    def _watch(self):
        factor = 1.0
        while True:
            time.sleep(1)
            elapsed = time.monotonic() - self.table[self.rank, self.START]
            if elapsed <= factor * self.table[self.rank, self.LIMIT]:
                continue
            factor = slowness()
            if self._is_hindmost_due(factor):
                self._end_the_job(factor)

    def _is_hindmost_due(self, factor):
        """Return whether the limits of this rank and of all ranks at the earliest test are over."""
        now, rows = time.monotonic(), self.table.tolist()
        due = [now - start > factor * limit for _, start, limit, _ in rows]
        last = min(position for position, *_ in rows)
        return due[self.rank] and all(
            late for late, row in zip(due, rows, strict=True) if row[self.POSITION] == last
        )

    def _end_the_job(self, factor):
        try:
            os.close(os.open(self.folder / "expired", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # another rank is already ending the job
        rows = self.table.tolist()
        pids = [int(row[self.PID]) for row in rows]
        for pid in pids:
            os.kill(pid, signal.SIGUSR2)
        time.sleep(2)
        positions = [int(row[self.POSITION]) for row in rows]
        late_ranks = [rank for rank, position in enumerate(positions) if position == min(positions)]
        limit = factor * rows[late_ranks[0]][self.LIMIT]
        lines = [
            f"\n=== {self.names[min(positions)]} did not end within its limit of {limit:.0f} s on "
            f"rank {', '.join(map(str, late_ranks))} of {self.size} ==="
        ]
        for rank, position in enumerate(positions):
            text = without_pytest((self.folder / f"stack-{rank}").read_text())
            text = text or "no answer: it may be stopped\n"
            lines.append(f"--- rank {rank} of {self.size}, in {self.names[position]}:\n{text}")
        self.stderr.write("\n".join(lines))
        self.stderr.flush()
        for rank, pid in enumerate(pids):
            if rank != self.rank:
                os.kill(pid, signal.SIGKILL)
        os._exit(1)


class Limits:
    """The plugin that implements pytest-timeout's limits with an Alarm or a Watch.

    If pytest-timeout is not installed, tests have no limit.
    """

    def __init__(self, timer):
        self.timer = timer

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item, settings):
        self.timer.set(item, settings.timeout)
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_cancel_timer(self, item):
        return True  # also called after a failure, before the fixtures' teardown

    def pytest_runtest_logfinish(self, nodeid):
        self.timer.cancel()

    def pytest_enter_pdb(self, config, pdb):
        self.timer.cancel()
