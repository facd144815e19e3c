"""Ranks from a notebook or a script: what MATLAB's parpool is there for."""

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

from mpidl import errors
from mpidl.comm import failure, launch_worker
from mpidl.comm.launcher import environment, launcher
from mpidl.comm.thread_budget import cores
from mpidl.errors import RankError, UserError

SHOWN = ("rank 0", "all", "none")
MARK = "MPIDL_LAUNCHED"  # in the environment of ranks that were started here
GRACE = 0.5  # seconds for the other ranks to tell of errors, too, and for what was printed
ENDING = 5.0  # seconds for mpirun to end its ranks before it is killed, which ends them, too
# Run by the ranks' Python: finds this package where this process has it.
START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from mpidl.comm.launch_worker import main; main(sys.argv.pop(1))"
)


def launch(function, *arguments, ranks=None, timeout=None, show="rank 0"):
    """Run function(world, *arguments) on ranks that mpirun starts; returns what rank 0 returns.

    function: of a module, of the script that is running, or of a notebook; the last, lambdas and
    functions in functions are sent by cloudpickle (pip install '.[notebook]'). A script is read
    again by each rank, as by Python's multiprocessing, so its own work stands under
    `if __name__ == "__main__":`. world: the rank's `World`. arguments: whatever can be pickled;
    each rank gets its copy. ranks: by default the tasks of a Slurm allocation, else as many as this
    process may use cores. timeout: seconds after which all ranks are ended (None: never). show:
    whose output is shown, as it comes: "rank 0" and what the others write to stderr, "all" (the
    others' lines headed by "rank 1: "), or "none".

    An exception on any rank ends all of them, and is a `RankError` with that rank's traceback here,
    a UserError or Fault one of these. Raises TimeoutError after `timeout` seconds. An interrupt
    ends all ranks; so does the end of this process. Started inside a rank it is refused.

    Arguments and results travel as files in a folder that only this user can read: in the temporary
    folder, on several hosts in $MPIDL_CACHE (~/.cache/mpidl), which all of them must see.
    """
    _refuse_inside_a_rank()
    if show not in SHOWN:
        raise UserError(f"launch: show must be one of {', '.join(SHOWN)}, got {show!r}")
    ranks = _default_ranks() if ranks is None else ranks
    if not isinstance(ranks, numbers.Integral) or isinstance(ranks, bool) or ranks < 1:
        raise UserError(f"launch: ranks must be a whole number, at least 1, got {ranks!r}")
    ranks = int(ranks)
    deadline = None if timeout is None else time.monotonic() + timeout
    folder = tempfile.mkdtemp(prefix="mpidl-launch-", dir=_place())
    try:
        _write_task(folder, function, arguments, show)
        package = os.path.dirname(os.path.dirname(os.path.abspath(errors.__file__)))
        command = [*launcher(ranks), sys.executable, "-c", START, package, folder]
        job = _Job(command, ranks, folder, show)
        try:
            in_time = job.follow(deadline)
        finally:
            job.end()
        _raise_error_of_a_rank(job)
        if not in_time:
            raise TimeoutError(
                f"launch: the {ranks} rank(s) were not done after {timeout:g} s and were ended"
            )
        if job.process.returncode or not os.path.exists(os.path.join(folder, "result")):
            raise RankError(job.epitaph())
        with open(os.path.join(folder, "result"), "rb") as file:
            return launch_worker.load(file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_inside_a_rank():
    started = failure.launched_ranks()
    if MARK in os.environ or started is not None:
        size = os.environ.get(MARK) or f"{started[1]} that {started[0]} tells of"
        raise UserError(
            f"launch: this process is a rank already, one of {size}, and ranks start no ranks; in "
            'a script, call it under if __name__ == "__main__":'
        )


def _default_ranks():
    tasks = os.environ.get("SLURM_NTASKS", "")
    here = cores()
    return int(tasks) if tasks.isdigit() else min(len(here.allowed), here.quota or sys.maxsize)


def _place():
    """The folder for the folder: None for the temporary one."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if not nodes.isdigit() or int(nodes) < 2:
        return None
    general = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = os.environ.get("MPIDL_CACHE") or os.path.join(general, "mpidl")
    os.makedirs(place, exist_ok=True)
    return place


def _main_program():
    """How a rank reads what __main__ is here: (kind, name) for `launched`; None in a notebook."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return None if name.rpartition(".")[2] == "__main__" else ("module", name)
    path = getattr(main, "__file__", None)
    return ("path", os.path.abspath(path)) if path and os.path.isfile(path) else None


def _write_task(folder, function, arguments, show):
    main = _main_program()
    by_value = main is None and getattr(function, "__module__", None) == "__main__"
    if by_value and launch_worker.cloudpickle() is None:
        raise UserError(
            "launch: what a notebook defines is sent by cloudpickle, which is not installed: "
            "pip install '.[notebook]', or put the function into a module"
        )
    about = {
        "path": [os.path.abspath(entry) for entry in sys.path],  # "" is this folder
        "argv": list(sys.argv),
        "main": main,
        "show": show,
        "host": platform.node(),
    }
    with open(os.path.join(folder, "task"), "wb") as file:
        pickle.dump(about, file)
        try:
            launch_worker.dump((function, arguments), file, by_value=main is None)
        except Exception as error:
            hint = "" if launch_worker.cloudpickle() else " (pip install '.[notebook]' sends more)"
            raise UserError(
                f"launch: the function or its arguments cannot be sent: {error}{hint}"
            ) from error


class _Job:
    """mpirun and its ranks, in a session of their own."""

    def __init__(self, command, ranks, folder, show):
        self.ranks, self.folder, self.show = ranks, folder, show
        self.lock = open(os.path.join(folder, launch_worker.LOCKED), "w")  # which the ranks watch
        with contextlib.suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.tail = collections.deque(maxlen=4096)  # of what was written to stderr
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment() | {MARK: str(ranks), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )

    def follow(self, deadline):
        """Show what the ranks write until they are done, or one of them tells of an error; False
        where the deadline came first."""
        decoders, told = {}, None
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
                if told is None and self.errors():
                    told = now
                if told is not None and now > told + GRACE:
                    return True
                if deadline is not None and now > deadline:
                    return bool(self.errors())
        while self.process.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def errors(self):
        """The ranks that told of an error."""
        names = os.listdir(self.folder)
        return sorted(int(n[6:]) for n in names if n.startswith("error-") and n[6:].isdigit())

    def _show(self, name, text):
        if name == "stderr":
            self.tail.extend(text)
        if text and self.show != "none":
            stream = getattr(sys, name)  # a notebook's, where this is one
            stream.write(text)
            stream.flush()

    def end(self):
        """Leave nothing running."""
        process = self.process
        try:
            if process.poll() is None:
                self._signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDING)
        finally:
            self._signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            process.stderr.close()
            self.lock.close()

    def epitaph(self):
        """How ranks ended that told of no error, in words."""
        last = "".join(self.tail).strip()
        said = f"; the last they wrote to stderr:\n{last}" if last else ""
        code = self.process.returncode
        return f"the {self.ranks} rank(s) ended with exit code {code} and no result{said}"

    def _signal(self, number):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _raise_error_of_a_rank(job):
    """Raise the error of the lowest rank that told of one."""
    failed = job.errors()
    if not failed:
        return
    with open(os.path.join(job.folder, f"error-{failed[0]}"), "rb") as file:
        told = pickle.load(file)
    if told["kind"] in ("UserError", "Fault"):
        raise getattr(errors, told["kind"])(told["line"])
    others = f" (and {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
    place = f"rank {told['rank']}{others} of {job.ranks} on {told['host'] or 'its host'}"
    error = RankError(f"{place} failed:\n\n{told['text']}", told["rank"], told["host"])
    raise error from _loaded(told["error"])


def _loaded(data):
    """The exception itself, or None where it cannot be made again here."""
    try:
        return None if data is None else launch_worker.load(io.BytesIO(data))
    except Exception:
        return None
