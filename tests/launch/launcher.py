"""Start jobs under mpirun as a user would, and end a job's processes at the end of its test."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from limits import wait_until

ROOT = Path(__file__).resolve().parents[2]


class Result(NamedTuple):
    """The output and the exit code of a job. The code is -N if signal N ended the job."""

    returncode: int
    stdout: str
    stderr: str


def environment(extra=None):
    """Return environment variables for a job: the variables of this process, and `extra`.

    Variables of launchers are removed. The checkout comes first on PYTHONPATH. The folder of this
    Python comes first on PATH, so that `mpirun` and `python` come from the same installation. Open
    MPI is configured to allow root, and to allow more ranks than cores.
    """
    launchers = ("PMI_", "PMIX_", "PRTE_", "OMPI_", "OPAL_", "HYDRA_", "HYDI_", "MPI_", "MPIR_")
    launchers += ("SLURM_",)
    env = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env |= {
        "PYTHONFAULTHANDLER": "1",  # print Python stacks on SIGABRT, to debug a hanging job
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    return env | {name: str(value) for name, value in (extra or {}).items()}


def command(ranks, *args, wrapper=(), options=()):
    """Return the command `mpirun options -n ranks wrapper python args...`.

    If `ranks` is None, the command does not contain mpirun.
    """
    python = [*wrapper, sys.executable, *map(str, args)]
    if ranks is None:
        return python
    path = environment()["PATH"]
    mpirun = shutil.which("mpirun", path=path) or pytest.fail(f"no mpirun on PATH={path}")
    return [mpirun, *options, "-n", str(ranks), *python]


class Job(subprocess.Popen):
    """A running job. At the end of a `with` block, all processes of the job are killed."""

    def __exit__(self, *exception):
        kill(self)
        return super().__exit__(*exception)

    def rank_pids(self):
        """Return {rank: process id} of the ranks that have started.

        A process that a rank has started, even if it has just been forked, is not a rank.
        """
        pids = {}
        for pid in _descendants(self.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
                env = dict(word.partition("=")[::2] for word in words.split("\0"))
                rank = env.get("PMI_RANK") or env.get("OMPI_COMM_WORLD_RANK")
                if rank is not None:
                    pids.setdefault(int(rank), pid)  # parents precede their children
        return pids

    def print_stacks(self):
        """Make each rank write its Python stacks to stderr and end."""
        ranks = set(self.rank_pids().values())
        launchers = [self.pid, *set(_descendants(self.pid)) - ranks]
        if not ranks:
            ranks, launchers = {self.pid}, []
        _send(launchers, signal.SIGSTOP)  # otherwise they would kill all ranks after the first end
        _send(ranks, signal.SIGABRT)  # prints the stacks; see PYTHONFAULTHANDLER
        time.sleep(1)
        _send(launchers, signal.SIGCONT)


def _send(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def start(
    ranks,
    *args,
    env=None,
    cwd=None,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    wrapper=(),
    options=(),
):
    """Start `mpirun options -n ranks wrapper python args...` with text pipes; return the Job."""
    return Job(
        command(ranks, *args, wrapper=wrapper, options=options),
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        text=True,
        env=environment(env),
        cwd=cwd,
        start_new_session=True,
    )


def finish(job, input=None):
    """Wait for a started job to end, and return its Result.

    If the time limit of the test expires first, end the job, and show its output and the Python
    stacks of all ranks.
    """
    expired = None
    try:
        stdout, stderr = job.communicate(input)
    except pytest.fail.Exception as error:
        expired = error
        job.print_stacks()
        # Let mpirun forward the stacks and end by itself; if it is killed, stacks may be lost.
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.communicate(timeout=5)
    finally:
        kill(job)
    if expired:
        pytest.fail(f"{expired}\n{format_output(job.args, *job.communicate())}")
    return Result(job.returncode, stdout, stderr)


def mpirun(ranks, *args, env=None, input=None, check=None, cwd=None):
    """Run `mpirun -n ranks python args...` to its end, and return the Result.

    `check` is the expected exit code. With a different code, the test fails and shows the output.
    """
    result = finish(start(ranks, *args, env=env, cwd=cwd), input)
    if check is not None and result.returncode != check:
        text = format_output(command(ranks, *args), result.stdout, result.stderr)
        pytest.fail(f"exit code {result.returncode}, expected {check}: {text}")
    return result


def assert_gone(pids):
    """Wait until processes are gone. Their parents may take a moment to reap them."""
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def marked(text):
    """Return the command lines of processes that were started with `text` in the environment."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (process / "environ").read_bytes():
                commands.append((process / "cmdline").read_bytes().replace(b"\0", b" ")[:200])
    return commands


def kill(job):
    """End mpirun, which ends its ranks, and then kill all remaining processes of the job."""
    family = _descendants(job.pid)  # each rank may be in a separate session
    if job.poll() is None:
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(5)
    _send([*family, *_descendants(job.pid)], signal.SIGKILL)
    if job.poll() is None:
        job.kill()


def _descendants(pid):
    """Return the IDs of all descendants of a process, except orphans."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    pids = list(children.get(pid, ()))
    for child in pids:
        pids.extend(children.get(child, ()))
    return pids


def format_output(args, stdout, stderr):
    return f"{' '.join(map(str, args))}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"
