"""Run a job under its launcher, determine why it ended, and end processes that it left behind."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mpidl.errors import UserError
from mpidl.ranks.exit_guard import ENDED_STATES, status_of
from mpidl.startup import JOB_TOKEN

if TYPE_CHECKING:
    from mpidl.ranks.failure import Signals

POLL_SECONDS = 0.2  # time between two checks for the end of the launcher
LOOK_SECONDS = 1.0  # time between two checks for children of the launcher
ALONE_SECONDS = 10.0  # longest time for which a launcher may have no child process
SUSPENDED_SECONDS = 5.0  # if more time passes between two checks, all processes were suspended
END_SECONDS = 10.0  # time that a launcher has to end its ranks
TAIL_LINES = 400  # number of lines that are kept from the end of stderr
FATAL = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGTERM)


class JobProcess:
    """A job that a launcher such as mpirun has started, in a separate process session.

    The output of the job appears on stdout and stderr of this process.

    Parameters
    ----------
    words : sequence of str
        The command line.
    environment : mapping
        Environment variables of the command.
    token : str
        Value of the environment variable `JOB_TOKEN`, which identifies the job.

    Raises
    ------
    UserError
        If the program cannot be started.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], token: str) -> None:
        self._mark = f"{JOB_TOKEN}={token}".encode()
        self.words, self.is_left_alone = words, False
        try:
            self._process = subprocess.Popen(
                words,
                env={**environment, JOB_TOKEN: token},
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that signals reach the job only through this process
            )
        except OSError as error:
            raise UserError(f"{words[0]}: cannot be started: {error.strerror}") from error
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        target, stderr = self._pass_on, self._process.stderr
        self._reader = threading.Thread(target=target, args=(stderr,), daemon=True)
        self._reader.start()

    def _pass_on(self, stderr):
        for line in stderr:
            text = line.decode(errors="replace")
            with contextlib.suppress(OSError):  # if stderr is closed, the job must not block
                sys.stderr.write(text)
                sys.stderr.flush()
            self._tail.append(text.rstrip("\n"))

    def wait(self, signals: Signals, has_children: bool) -> int:
        """Wait for the end of the job and return its exit code, negative if a signal killed it.

        Parameters
        ----------
        signals : Signals
            Requests to stop. The job receives USR1 at the first request.
        has_children : bool
            Whether the launcher starts the ranks on this host. If the process between the launcher
            and the ranks is killed while MPI starts, the launcher and the ranks would wait forever.
            This method detects this case, and ends the launcher and the ranks.
        """
        is_asked, look_time = False, time.monotonic()
        alone_since = look_time
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self._process.wait(POLL_SECONDS)
                if signals.name and not is_asked:
                    is_asked = True
                    self._process.send_signal(signal.SIGUSR1)
                now = time.monotonic()
                if not has_children or now - look_time < LOOK_SECONDS:
                    continue
                if now - look_time > SUSPENDED_SECONDS or self._has_child():
                    alone_since = now
                look_time = now
                if now - alone_since > ALONE_SECONDS:
                    self.is_left_alone = True
                    self._process.kill()
        finally:
            self.end()

    def end(self) -> None:
        """End the launcher and all processes of the job on this host."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            self._process.kill()
            self._process.wait()
        deadline = time.monotonic() + END_SECONDS
        while (orphans := self._orphans()) and time.monotonic() < deadline:
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._reader.join(2)

    def _has_child(self):
        """Return whether the launcher has a running child process."""
        pid = self._process.pid
        try:
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                children = file.read().split()
        except OSError:
            return True  # the system does not list children
        return any(status_of(child)[0] not in ENDED_STATES for child in children)

    def _orphans(self):
        """Return the IDs of the job's processes on this host, except the launcher."""
        pids = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != self._process.pid:
                with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                    if self._mark in file.read().split(b"\0"):
                        pids.append(int(name))
        return pids

    @property
    def has_message(self) -> bool:
        """Whether the job has printed a message of mpidl on stderr."""
        return any(line.startswith("mpidl: ") for line in self._tail)

    def cause(self, code: int) -> str:
        """Describe in one line why the job has ended with this exit code."""
        name = os.path.basename(self.words[0])
        if self.is_left_alone:
            return f"the processes of {name} on this host have ended, but {name} itself has not"
        return (
            _cause_of_mpidl(self._tail)
            or _cause_of_launcher(self._tail)
            or _cause_of_code(name, code)
        )


def _cause_of_mpidl(tail):
    """Return mpidl's first message on stderr, with its second line or the exception after it."""
    lines = [*tail, ""]
    for line, following in itertools.pairwise(lines):
        if line.startswith("mpidl: "):
            text = line.removeprefix("mpidl: ")
            if following.startswith("Traceback"):
                rest = lines[lines.index(following) + 1 :]
                following = " " + next((line for line in rest if line[:1] != " "), "")
            return f"{text} {following.strip()}" if following.startswith(" ") else text
    return ""


def _cause_of_launcher(tail):
    """Return what MPICH's or Open MPI's mpirun reports about the process that ended first."""
    text = "\n".join(tail)
    pattern = r"PID (\d+) RUNNING AT (\S+)(?:.*?EXIT STRING: ([^\n]*?) \(signal)?"
    mpich = re.search(pattern, text, re.S)
    if mpich is not None:
        pid, host, outcome = mpich.groups()
        return f"process {pid} on host {host} has ended{f': {outcome}' if outcome else ''}"
    pattern = r"process rank (\d+) with PID (\d+) on node (\S+) exited on\s+([^\n]*)"
    openmpi = re.search(pattern, text)
    if openmpi is not None:
        rank, pid, host, outcome = openmpi.groups()
        return f"rank {rank} (process {pid}) on host {host} has ended: {outcome.rstrip('.')}"
    lost_host = re.search(r"Remote daemon: \[\S+\] on node (\S+)", text)
    return "" if lost_host is None else f"mpirun has lost host {lost_host[1]}"


def _cause_of_code(name, code):
    if code < 0:
        return f"{name} was killed by {signal.Signals(-code).name}"
    # If a signal kills a rank, MPICH's mpirun exits with the number of the signal. Other launchers
    # add 128 to the number.
    number = code - 128 if code > 128 else code
    hint = f": {signal.Signals(number).name} has killed a process" if number in FATAL else ""
    return f"{name} ended with exit code {code}{hint}"
