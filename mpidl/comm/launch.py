"""Start ranks from a notebook or a script, like MATLAB's parpool."""

from __future__ import annotations

import codecs
import collections
import contextlib
import fcntl
import io
import numbers
import os
import pickle
import platform
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

from mpidl import errors
from mpidl.comm import failure, launch_worker
from mpidl.comm.launcher import environment, launcher
from mpidl.comm.thread_budget import available_cores
from mpidl.errors import RankError, UserError

Returned = TypeVar("Returned")

SHOW_CHOICES = ("rank 0", "all", "none")
SIZE_VARIABLE = "MPIDL_LAUNCHED"  # set to the number of ranks for each rank that `launch` starts
ERROR_GRACE = 0.5  # seconds to wait for errors of other ranks and for remaining output
TERMINATION_GRACE = 5.0  # seconds that mpirun has to end its ranks before all are killed
# The program of each rank. It imports this package from the same folder as this process does.
RANK_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from mpidl.comm.launch_worker import main; main(sys.argv.pop(1))"
)


def launch(
    function: Callable[..., Returned],
    *arguments: Any,
    ranks: int | None = None,
    timeout: float | None = None,
    show: str = "rank 0",
) -> Returned:
    """Run `function(world, *arguments)` on ranks that mpirun starts.

    Parameters
    ----------
    function : callable
        Function to call on each rank, with the rank's `World` as its first argument. It may be
        defined in a module, in the running script or in a notebook. Functions defined in a
        notebook, lambdas and nested functions require cloudpickle (`pip install '.[notebook]'`).
    *arguments
        Arguments of the function after the `World`. They must be picklable; each rank gets a copy.
    ranks : int, optional
        Number of ranks. The default is the number of tasks of the Slurm allocation, or else the
        number of cores that this process may use.
    timeout : float, optional
        Seconds after which all ranks are terminated; None for no limit.
    show : {"rank 0", "all", "none"}
        Ranks whose output is shown as soon as it arrives. "rank 0" also shows what the other ranks
        write to stderr. Lines of ranks other than 0 have a prefix, such as "rank 1: ".

    Returns
    -------
    object
        The return value of rank 0.

    Raises
    ------
    UserError, Fault
        If a rank raises one of these exceptions. UserError is also raised if an argument is
        invalid, or if this process is itself a rank.
    RankError
        If a rank raises any other exception, or if the ranks end without a result. The message
        contains the traceback of the exception.
    TimeoutError
        If the ranks do not finish within `timeout` seconds.

    Notes
    -----
    An exception on any rank terminates all ranks. So does an interrupt or the end of this process.

    Each rank runs the calling script again to define its functions, as Python's multiprocessing
    does.
    Code that must run only once must be inside `if __name__ == "__main__":`.

    Arguments and results are passed in files, in a folder that only this user can read. The folder
    is created in the temporary folder or, on several hosts, in $MPIDL_CACHE (by default
    ~/.cache/mpidl), which all hosts must share.
    """
    _refuse_inside_a_rank()
    if show not in SHOW_CHOICES:
        raise UserError(f"launch: show must be one of {', '.join(SHOW_CHOICES)}, got {show!r}")
    ranks = _default_ranks() if ranks is None else ranks
    if not isinstance(ranks, numbers.Integral) or isinstance(ranks, bool) or ranks < 1:
        raise UserError(f"launch: ranks must be a whole number, at least 1, got {ranks!r}")
    ranks = int(ranks)
    deadline = None if timeout is None else time.monotonic() + timeout
    folder = tempfile.mkdtemp(prefix="mpidl-launch-", dir=_parent_folder())
    try:
        _write_task(folder, function, arguments, show)
        package = os.path.dirname(os.path.dirname(os.path.abspath(errors.__file__)))
        command = [*launcher(ranks), sys.executable, "-c", RANK_PROGRAM, package, folder]
        job = _Job(command, ranks, folder, show)
        try:
            in_time = job.follow(deadline)
        finally:
            job.end()
        _raise_error_of_a_rank(job)
        if not in_time:
            raise TimeoutError(
                f"launch: the {ranks} rank(s) did not finish within {timeout:g} s and were stopped"
            )
        if job.process.returncode or not os.path.exists(os.path.join(folder, "result")):
            raise RankError(job.describe_exit())
        with open(os.path.join(folder, "result"), "rb") as file:
            return launch_worker.load(file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_inside_a_rank():
    """Raise UserError if this process is a rank."""
    started = failure.launched_ranks()
    if SIZE_VARIABLE in os.environ or started is not None:
        size = os.environ.get(SIZE_VARIABLE) or f"{started[1]} as {started[0]} says"
        raise UserError(
            f"launch: this process is already a rank, one of {size}, and cannot start ranks; in a "
            'script, call launch under if __name__ == "__main__":'
        )


def _default_ranks():
    """Return the number of tasks that Slurm allocated, or else the number of usable cores."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    if tasks.isdigit():
        return int(tasks)
    cores = available_cores()
    return min(len(cores.allowed), cores.quota or sys.maxsize)


def _parent_folder():
    """Return the folder in which `launch` creates a job's folder; None for the temporary folder."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if not nodes.isdigit() or int(nodes) < 2:
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.environ.get("MPIDL_CACHE") or os.path.join(cache, "mpidl")
    os.makedirs(folder, exist_ok=True)
    return folder


def _main_program():
    """Return how a rank can run this __main__ again: (kind, name), or None in a notebook."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return None if name.rpartition(".")[2] == "__main__" else ("module", name)
    path = getattr(main, "__file__", None)
    return ("path", os.path.abspath(path)) if path and os.path.isfile(path) else None


def _write_task(folder, function, arguments, show):
    """Write the function, its arguments and the settings to the file that each rank reads."""
    main = _main_program()
    by_value = main is None and getattr(function, "__module__", None) == "__main__"
    if by_value and launch_worker.cloudpickle() is None:
        raise UserError(
            "launch: functions defined in a notebook require cloudpickle, which is not "
            "installed: pip install '.[notebook]', or move the function to a module"
        )
    task = {
        "path": [os.path.abspath(entry) for entry in sys.path],  # "" means the current folder
        "argv": list(sys.argv),
        "main": main,
        "show": show,
        "host": platform.node(),
    }
    with open(os.path.join(folder, "task"), "wb") as file:
        pickle.dump(task, file)
        try:
            launch_worker.dump((function, arguments), file, by_value=main is None)
        except Exception as error:
            hint = (
                ""
                if launch_worker.cloudpickle()
                else " (with pip install '.[notebook]', more can be sent)"
            )
            raise UserError(
                f"launch: the function or its arguments cannot be sent: {error}{hint}"
            ) from error


class _Job:
    """A running mpirun and its ranks, in a separate process session."""

    def __init__(self, command, ranks, folder, show):
        self.ranks, self.folder, self.show = ranks, folder, show
        # Ranks on this host end when the lock is released.
        self.lock = open(os.path.join(folder, launch_worker.LOCK_FILE), "w")
        with contextlib.suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.tail = collections.deque(maxlen=4096)  # last characters of stderr
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment() | {SIZE_VARIABLE: str(ranks), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )

    def follow(self, deadline):
        """Show the ranks' output until they end or one reports an error.

        Return False if the deadline passes first.
        """
        decoders, error_time = {}, None
        with selectors.DefaultSelector() as pipes:
            for pipe, name in ((self.process.stdout, "stdout"), (self.process.stderr, "stderr")):
                pipes.register(pipe, selectors.EVENT_READ, name)
                decoders[name] = codecs.getincrementaldecoder("utf-8")("replace")
            while pipes.get_map():
                for key, _ in pipes.select(0.05):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        pipes.unregister(key.fileobj)
                    self._show(key.data, decoders[key.data].decode(data, final=not data))
                now = time.monotonic()
                if error_time is None and self.failed_ranks():
                    error_time = now
                if error_time is not None and now > error_time + ERROR_GRACE:
                    return True
                if deadline is not None and now > deadline:
                    return bool(self.failed_ranks())
        while self.process.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def failed_ranks(self):
        """Return the ranks that reported an error, in ascending order."""
        names = os.listdir(self.folder)
        return sorted(int(n[6:]) for n in names if n.startswith("error-") and n[6:].isdigit())

    def _show(self, name, text):
        """Print output from the ranks' stream `name`, and keep the end of stderr."""
        if name == "stderr":
            self.tail.extend(text)
        if text and self.show != "none":
            stream = getattr(sys, name)  # a notebook replaces the stream to show the output
            stream.write(text)
            stream.flush()

    def end(self):
        """Terminate all processes of the job."""
        process = self.process
        try:
            if process.poll() is None:
                self._signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(TERMINATION_GRACE)
        finally:
            self._signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            process.stderr.close()
            self.lock.close()

    def describe_exit(self):
        """Describe how the ranks ended if none of them reported an error."""
        tail = "".join(self.tail).strip()
        stderr = f"; the end of their stderr:\n{tail}" if tail else ""
        code = self.process.returncode
        return f"the {self.ranks} rank(s) ended with exit code {code} and no result{stderr}"

    def _signal(self, number):
        """Send a signal to all processes of the session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _raise_error_of_a_rank(job):
    """Raise the error of the lowest rank that reported one."""
    failed = job.failed_ranks()
    if not failed:
        return
    with open(os.path.join(job.folder, f"error-{failed[0]}"), "rb") as file:
        report = pickle.load(file)
    if report["kind"] in ("UserError", "Fault"):
        raise getattr(errors, report["kind"])(report["line"])
    further = f" (and {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
    ranks = f"rank {report['rank']}{further} of {job.ranks} on {report['host'] or 'its host'}"
    error = RankError(f"{ranks} failed:\n\n{report['text']}", report["rank"], report["host"])
    raise error from _load_exception(report["error"])


def _load_exception(data):
    """Unpickle an exception; return None if there is none or it cannot be unpickled here."""
    try:
        return None if data is None else launch_worker.load(io.BytesIO(data))
    except Exception:
        return None
