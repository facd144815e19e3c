"""Publish what this process is doing, in memory that other processes on the host can read.

A rank that hangs cannot report its state over MPI, and a stopped process cannot report at all. Each
process therefore records its current *act* in an in-memory file. An act is a wait or an MPI call
that may block. Other ranks on the host read this file through /proc, and request Python stacks by
sending a signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import mmap
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from struct import Struct
from typing import BinaryIO, NamedTuple

from mpidl.ranks import exit_guard
from mpidl.ranks.exit_guard import ENDED_STATES as ENDED_STATES
from mpidl.ranks.exit_guard import STOPPED_STATES as STOPPED_STATES

# When this signal arrives, faulthandler writes the stacks of all threads, even if the main thread
# never returns to the interpreter. Launchers and batch systems do not use real-time signals.
STACK_SIGNAL = signal.SIGRTMIN + 5
STACK_SECONDS = 0.4  # longest wait for the stacks of other processes
TEXT_BYTES = 240  # largest size of the text in the file
PAGE = 4096  # the first page of the file contains the act; the stacks follow
_ACTIVITY = Struct(f"{TEXT_BYTES}s")
_ACT = Struct(f"<d?{TEXT_BYTES}s")  # start time, whether the operation is running, name
_END = Struct("<d?")  # the first two fields of `_ACT`

HIDDEN = "?"
# {state in /proc: text for messages}. For all other states, messages say "is running".
STATES = (
    dict.fromkeys(ENDED_STATES, "has ended")
    | STOPPED_STATES
    | {
        "D": "waits for a disk or a driver",
        HIDDEN: "is in another container, so no rank can inspect it",
    }
)


class Address(NamedTuple):
    """The location of a process's act file, for other processes on the host."""

    pid: int
    namespace: str
    descriptor: int
    inode: int


class Sighting(NamedTuple):
    """The state of a process, as seen by another process on the same host.

    Attributes
    ----------
    state : str
        Letter of the state in /proc; "" if the process has ended, `HIDDEN` if the process is in
        another container.
    act : str
        The last act, such as "epoch 3, iteration 17: waits for gop max, for 12 s"; "" if unknown.
    stacks : str
        Python stacks of the threads of the process; "" if the process does not respond.
    """

    state: str
    act: str = ""
    stacks: str = ""


class ActRecord:
    """The current act of the main thread of this process.

    Attributes
    ----------
    address : Address
        Location of the file, which other processes pass to `look_at`.
    operation : str or None
        Name of the wait or MPI call that the main thread has begun but not ended, or None.
    limit : float
        Longest allowed time in seconds between two calls to `renew` during an operation.
    count : int
        A counter that changes at the start and end of each act and at each call to `renew`.
    """

    def __init__(self) -> None:
        descriptor = _file_in_memory()
        os.ftruncate(descriptor, PAGE)
        os.lseek(descriptor, 0, os.SEEK_END)
        self._memory = mmap.mmap(descriptor, PAGE)
        inode = os.fstat(descriptor).st_ino
        self.address = Address(os.getpid(), _namespace(), descriptor, inode)
        faulthandler.register(STACK_SIGNAL, descriptor, all_threads=True)
        self.operation: str | None = None
        self.limit, self.count = float("inf"), 0
        _ACT.pack_into(self._memory, TEXT_BYTES, time.monotonic(), False, b"the start")

    def activity(self, text: str) -> None:
        """Record the current activity of the program, such as "epoch 3, iteration 17"."""
        _ACTIVITY.pack_into(self._memory, 0, text.encode())

    def begin(self, operation: str, limit: float) -> tuple[str | None, float]:
        """Record that an operation begins; return the enclosing operation, to pass to `end`."""
        outer = self.operation, self.limit
        self.operation, self.limit = operation, limit
        self.count += 1
        _ACT.pack_into(self._memory, TEXT_BYTES, time.monotonic(), True, operation.encode())
        return outer

    def renew(self) -> None:
        """Record that MPI has returned to the main thread."""
        self.count += 1

    def end(self, outer: tuple[str | None, float]) -> None:
        """Record that an operation has ended; `outer` is the value that `begin` returned."""
        operation, self.limit = outer
        if operation is not None:
            self.begin(operation, self.limit)
            return
        self.operation, self.count = None, self.count + 1
        _END.pack_into(self._memory, TEXT_BYTES, time.monotonic(), False)


@functools.cache
def record() -> ActRecord:
    """Return the `ActRecord` of this process; the first call creates it."""
    return ActRecord()


def look_at(addresses: Sequence[Address], stacks: bool = True) -> list[Sighting]:
    """Return a `Sighting` of each of the given processes, which must be on this host.

    Parameters
    ----------
    addresses : sequence of Address
        Locations of the act files of the processes.
    stacks : bool
        Whether to request Python stacks. A stopped process cannot respond.
    """
    with contextlib.ExitStack() as files:
        views = [_View(address, files) for address in addresses]
        running = [view for view in views if stacks and view.request_stacks()]
        deadline = time.monotonic() + STACK_SECONDS
        while not all([view.has_stacks() for view in running]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [view.sighting() for view in views]


class _View:
    """The act file of another process; `file` is None if the process has ended."""

    def __init__(self, address, files):
        self.address, self.state = address, state_of(address)
        self.start = self.size = 0
        self.file: BinaryIO | None = None
        if self.state in (*ENDED_STATES, HIDDEN):
            return
        try:
            path = f"/proc/{address.pid}/fd/{address.descriptor}"
            file = files.enter_context(open(path, "rb"))
            if os.fstat(file.fileno()).st_ino == address.inode:
                self.file = file
            else:
                self.state = ""  # the process ID now belongs to another process
        except OSError:
            self.state = state_of(address)  # the process may have ended meanwhile

    def request_stacks(self):
        """Send the signal if the process can respond; return whether the signal was sent."""
        if self.file is None or self.state in STOPPED_STATES:
            return False
        self.start = self.size = os.fstat(self.file.fileno()).st_size
        with contextlib.suppress(OSError):
            os.kill(self.address.pid, STACK_SIGNAL)
        return True

    def has_stacks(self):
        """Return whether the file has grown since the request and has stopped growing."""
        assert self.file is not None  # otherwise no stacks were requested
        previous, self.size = self.size, os.fstat(self.file.fileno()).st_size
        return self.size == previous > self.start

    def sighting(self):
        if self.file is None:
            return Sighting(self.state)
        page = self.file.read(PAGE)
        self.file.seek(self.start)
        stacks = self.file.read(self.size - self.start).decode(errors="replace").strip()
        since, is_waiting, operation = _ACT.unpack_from(page, TEXT_BYTES)
        act = f"{'waits for' if is_waiting else 'computes, after'} {_text(operation)}"
        age = max(time.monotonic() - since, 0.0)  # all processes on a host share this clock
        activity = _text(page[:TEXT_BYTES])
        return Sighting(self.state, f"{activity}: {act}, for {age:.0f} s", stacks)


def _text(field):
    return field.rstrip(b"\0").decode(errors="replace")


def state_of(address: Address) -> str:
    """Return the state of a process; see `Sighting`."""
    if address.namespace != record().address.namespace:
        return HIDDEN
    return exit_guard.status_of(address.pid)[0]


def _namespace():
    """Return the name of this process's PID namespace, which identifies its container."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _file_in_memory():
    """Return the descriptor of an anonymous file in memory, which disappears with this process."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mpidl-acts")
    with tempfile.TemporaryFile() as file:  # Python was built for glibc before 2.27
        return os.dup(file.fileno())
