"""Describe the process that holds the lock of a run's folder, as stored in the lock file."""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from mpidl import startup
from mpidl.text import printable

MAX_TEXT = 200  # largest number of characters in a string of a lock file
MAX_NUMBER = 2**40  # largest number in a lock file


@dataclass(frozen=True)
class Holder:
    """A process that holds the lock of a folder, or tries to take it.

    Attributes
    ----------
    token : str
        Random hexadecimal digits that identify this holder.
    host : str
        Name of the host.
    machine : str
        Identifiers of the host's current boot and of the PID namespace; "" if the system does not
        provide them. A process can check only processes with the same value of this attribute.
    pid : int
        Process ID.
    process_start : int
        When the process started, in clock ticks since boot; -1 if the system does not provide it.
        The value distinguishes the process from a later process with the same ID.
    since : float
        When the process began to take the lock, in seconds since 1970 by the host's clock.
    job : str
        Slurm's job number with the name of the cluster; "" outside Slurm.
    restart : int
        How many times Slurm has requeued the job.
    launch : str
        Token of the `mpidl.launch` command that started the process; "" if the process was started
        in another way.
    start : int
        How many times `mpidl.launch` has started the training run, including this time.
    """

    token: str
    host: str
    machine: str
    pid: int
    process_start: int
    since: float
    job: str = ""
    restart: int = 0
    launch: str = ""
    start: int = 0

    @staticmethod
    def current(environment: Mapping[str, str] = os.environ) -> Holder:
        """Return a Holder that describes this process; each call creates a new token."""
        job, cluster = (environment.get(f"SLURM_{name}", "") for name in ("JOB_ID", "CLUSTER_NAME"))
        pid = os.getpid()
        return Holder(
            token=secrets.token_hex(8),
            host=platform.node(),
            machine=_machine(),
            pid=pid,
            process_start=_process_start(pid),
            since=time.time(),
            job=f"{job} of cluster {cluster}" if job and cluster else job,
            restart=_number(environment.get("SLURM_RESTART_COUNT", "")),
            launch=environment.get(startup.JOB_TOKEN, ""),
            start=_number(environment.get(startup.JOB_START, "")),
        )

    def renamed(self) -> Holder:
        """Return a Holder of the same process with a new token."""
        return replace(self, token=secrets.token_hex(8))

    def content(self) -> bytes:
        """Return the content of the lock file."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @staticmethod
    def parse(content: bytes) -> Holder | None:
        """Return the holder that a file's content describes; None if the content is invalid."""
        try:
            values = json.loads(content)
            holder = Holder(**values)
        except (ValueError, TypeError, RecursionError):
            return None
        is_valid = all(
            isinstance(value, bool) is False and _fits(value, _TYPES[name])
            for name, value in values.items()
        )
        return holder if is_valid and re.fullmatch("[0-9a-f]{16}", holder.token) else None

    def describe(self) -> str:
        """Return a description of the process: ID, host, job, and when it took the lock."""
        jobs = []
        if self.job:
            jobs.append(f"Slurm job {self.job}, restart {self.restart}")
        if self.launch:
            jobs.append(f"start {self.start} of mpidl launch")
        job = f" ({'; '.join(jobs)})" if jobs else ""
        since = time.strftime("%F %T", time.localtime(self.since))
        return printable(f"process {self.pid} on host {self.host}{job} since {since}")

    def follows(self, earlier: Holder) -> bool:
        """Return whether this process is a later start of the same job.

        If it is, the earlier process has ended: Slurm and `mpidl.launch` end a job before they
        start it again.
        """
        is_requeued = self.job == earlier.job != "" and self.restart > earlier.restart
        is_restarted = self.launch == earlier.launch != "" and self.start > earlier.start
        return is_requeued or is_restarted

    def is_alive(self) -> bool | None:
        """Return whether the holder's process exists; None if this process cannot tell."""
        if not self.machine or self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # the process belongs to another user
            pass
        start = _process_start(self.pid)
        if -1 in (start, self.process_start):
            return None
        return start == self.process_start


_KINDS = {"int": int, "float": float, "str": str}
_TYPES = {field.name: _KINDS[str(field.type)] for field in fields(Holder)}


def _fits(value, kind):
    if kind is str:
        return isinstance(value, str) and len(value) <= MAX_TEXT
    return isinstance(value, (int, kind)) and -1 <= value <= MAX_NUMBER


def _number(text):
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _machine():
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_start(pid):
    """Return when a process started, in clock ticks; 0 if it has ended, -1 if unknown."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *values = file.read().rpartition(")")[2].split()
    except OSError:
        return -1
    return 0 if state in "XZ" else int(values[18])
