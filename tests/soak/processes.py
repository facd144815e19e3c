"""Start a training run, and find the processes to kill and the remaining processes."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import jobs
import launcher

from mpidl.ranks import acts

MARK = "MPIDL_SOAK_CHAIN"  # environment variable of all processes of a chain
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun")
PROXIES = ("hydra_pmi_proxy", "prted")


class Job:
    """A started training run. All of its processes have `mark` in their environment."""

    def __init__(self, words, folder, mark):
        self.mark = f"{MARK}={mark}\0".encode()
        self.paths = folder / "stdout", folder / "stderr"
        environment = launcher.environment(jobs.without_plots() | {MARK: mark, "TMPDIR": folder})
        self.start_time = time.time()
        with open(self.paths[0], "wb") as stdout, open(self.paths[1], "wb") as stderr:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )

    def members(self):
        """Return {process id: rank or None} of the processes that have not ended."""
        members = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                content = Path(f"/proc/{name}/environ").read_bytes()
                if self.mark in content:
                    words = dict(word.partition(b"=")[::2] for word in content.split(b"\0"))
                    rank = words.get(b"PMI_RANK") or words.get(b"OMPI_COMM_WORLD_RANK")
                    members[int(name)] = None if rank is None else int(rank)
        return members

    def victims(self, victim, rank):
        """Return the processes to kill, or the launcher if a rank or proxy has not started yet."""
        members = self.members()
        if victim == "all":
            return list(members)
        if victim == "rank":
            pids = [pid for pid, number in members.items() if number == rank]
        else:
            names = LAUNCHERS if victim == "mpirun" else PROXIES
            pids = [pid for pid in members if _read(f"/proc/{pid}/comm") in names]
        return pids or [self.process.pid]

    def has_ended(self):
        return self.process.poll() is not None

    def wait(self, seconds):
        """Wait until no process remains. Return the elapsed seconds, or None after `seconds`.

        A process has no environment while execve replaces its program, so `members` must find
        none of them twice.
        """
        start = time.monotonic()
        empty_looks = 0
        while time.monotonic() - start < seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
                empty_looks = 0 if self.members() else empty_looks + 1
                if empty_looks == 2:
                    return time.monotonic() - start
                time.sleep(0.05)
        return None

    def stacks(self):
        """Return the status and stacks of the processes that have not ended."""
        texts = []
        for pid, rank in self.members().items():
            texts.append(f"=== {pid}, rank {rank}\n" + _read(f"/proc/{pid}/status"))
            texts += [f"{name}: {_read(f'/proc/{pid}/{name}')}\n" for name in ("wchan", "syscall")]
            record = next((path for path in _files(pid) if "mpidl-acts" in os.readlink(path)), None)
            if record is not None:
                os.kill(pid, acts.STACK_SIGNAL)
                time.sleep(1)
                texts.append(_read(record).replace("\0", ""))
        return "\n".join(texts)

    def kill(self):
        send(self.members(), signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def stderr(self):
        return self.paths[1].read_text(errors="replace")


def _read(path):
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _files(pid):
    """Return the paths of a process's open files."""
    with contextlib.suppress(OSError):
        return [path for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return []


def send(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
