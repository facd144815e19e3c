"""Start ranks from a notebook or a script, like MATLAB's parpool."""

from __future__ import annotations

import io
import numbers
import os
import pickle
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

from mpidl import errors
from mpidl.errors import RankError, UserError
from mpidl.jobs import launch_worker
from mpidl.jobs.launch_job import SIZE_VARIABLE, Interrupts, Job
from mpidl.launcher import launcher
from mpidl.ranks import failure
from mpidl.ranks.thread_budget import available_cores
from mpidl.report.progress import notebook
from mpidl.text import pip_install

Returned = TypeVar("Returned")

SHOW_CHOICES = ("rank 0", "all", "none")
PLOTS_CHOICES = ("none", "live")
NOTHING_SHOWN = (
    'note: plots="live" had nothing to show: train with dl.train, or call '
    "world.report(epoch=epoch, loss=loss) in your loop"
)
# The program of each rank. It imports this package from the same folder as this process.
RANK_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from mpidl.jobs.launch_worker import main; main(sys.argv.pop(1))"
)


def launch(
    function: Callable[..., Returned],
    *arguments: Any,
    ranks: int | None = None,
    timeout: float | None = None,
    show: str = "rank 0",
    plots: str = "none",
) -> Returned:
    """Run `function(world, *arguments)` on ranks that mpirun starts.

    Parameters
    ----------
    function : callable
        Function to call on each rank, with the rank's `World` as its first argument. The function
        may be defined in a module, in the running script or in a notebook. Functions defined in a
        notebook, lambdas and nested functions require cloudpickle
        (`pip install 'mpidl[notebook]'`).
    *arguments
        Further arguments of the function, which must be picklable. Each rank gets a copy.
    ranks : int, optional
        Number of ranks. The default is the number of tasks of the Slurm allocation or, outside
        Slurm, the number of cores that this process may use.
    timeout : float, optional
        Seconds after which all ranks are terminated. By default, there is no limit.
    show : {"rank 0", "all", "none"}
        Ranks whose output is shown as soon as it arrives. "rank 0" also shows the stderr output of
        the other ranks. Lines of ranks other than 0 have a prefix, such as "rank 1: ".
    plots : {"none", "live"}
        In a notebook, "live" shows the progress of each training run, and of a custom loop that
        calls `world.report`: the curves of loss and accuracy, the epoch, the learning rate and the
        time. Outside notebooks, "live" has no effect.

    Returns
    -------
    object
        The return value of rank 0.

    Raises
    ------
    UserError, Fault
        If a rank raises UserError or Fault. UserError is also raised if an argument is invalid, or
        if this process is itself a rank.
    RankError
        If a rank raises any other exception, or if the ranks end without a result. The message
        contains the traceback of the exception.
    TimeoutError
        If the ranks do not finish within `timeout` seconds.
    KeyboardInterrupt
        If an interrupt ends the ranks; see the notes.

    Notes
    -----
    An exception on any rank terminates all ranks. If this process ends, the ranks end too.

    An interrupt (Ctrl-C, or *interrupt* in a notebook) is passed on to rank 0. If the ranks are
    training, the training writes a checkpoint and stops after the current mini-batch. The function
    then continues with a result whose attribute `stopped` is "SIGINT". If the ranks are not
    training, they end, and `launch` raises KeyboardInterrupt. A second interrupt ends all ranks at
    once.

    As in Python's multiprocessing, each rank runs the calling script again to define its functions.
    Code that must run only once must be inside `if __name__ == "__main__":`.

    Arguments and results are passed in files, in a folder that only the current user can read. The
    folder is created in the system's temporary folder. If there are several hosts, it is created in
    $MPIDL_CACHE (by default ~/.cache/mpidl), which must be visible on all hosts.
    """
    _refuse_inside_a_rank()
    for name, value, choices in (("show", show, SHOW_CHOICES), ("plots", plots, PLOTS_CHOICES)):
        if value not in choices:
            raise UserError(f"launch: {name} must be one of {', '.join(choices)}, got {value!r}")
    ranks = _default_ranks() if ranks is None else ranks
    if not isinstance(ranks, numbers.Integral) or isinstance(ranks, bool) or ranks < 1:
        raise UserError(f"launch: ranks must be a whole number, at least 1, got {ranks!r}")
    ranks = int(ranks)
    deadline = None if timeout is None else time.monotonic() + timeout
    folder = tempfile.mkdtemp(prefix="mpidl-launch-", dir=_parent_folder())
    try:
        is_live = plots == "live" and notebook.in_notebook()
        display = notebook.LiveDisplay(folder) if is_live else None
        _write_task(folder, function, arguments, show, is_live)
        package = os.path.dirname(os.path.dirname(os.path.abspath(errors.__file__)))
        command = [*launcher(ranks), sys.executable, "-c", RANK_PROGRAM, package, folder]
        with Interrupts() as interrupts:
            update = None if display is None else display.update
            job = Job(command, ranks, folder, show, interrupts, update)
            try:
                in_time = job.follow(deadline)
            finally:
                job.end()
                if display is not None:
                    display.update(is_last=True)
        _raise_error_of_a_rank(job)
        if not in_time:
            raise TimeoutError(
                f"launch: the {ranks} rank(s) did not finish within {timeout:g} s and were stopped"
            )
        if job.process.returncode or not os.path.exists(os.path.join(folder, "result")):
            raise RankError(job.describe_exit())
        if display is not None and not display.runs:
            print(NOTHING_SHOWN, file=sys.stderr)
        with open(os.path.join(folder, "result"), "rb") as file:
            return launch_worker.load(file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_inside_a_rank():
    """Raise UserError if this process is a rank."""
    size, started = os.environ.get(SIZE_VARIABLE), failure.launched_ranks()
    if not size and started is not None:
        size = f"{started[1]} according to {started[0]}"
    if size:
        raise UserError(
            f"launch: this process is already a rank, one of {size}, and cannot start ranks; in a "
            'script, call launch under if __name__ == "__main__":'
        )


def _default_ranks():
    """Return the number of Slurm tasks or, outside Slurm, the number of usable cores."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    if tasks.isdigit():
        return int(tasks)
    cores = available_cores()
    return min(len(cores.allowed), cores.quota or sys.maxsize)


def _parent_folder():
    """Return the folder in which to create the folder of a job; None for the temporary folder."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if not nodes.isdigit() or int(nodes) < 2:
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.environ.get("MPIDL_CACHE") or os.path.join(cache, "mpidl")
    os.makedirs(folder, exist_ok=True)
    return folder


def _main_program():
    """Return (kind, name), which tells a rank how to run `__main__` again; None in a notebook."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return None if name.rpartition(".")[2] == "__main__" else ("module", name)
    path = getattr(main, "__file__", None)
    return ("path", os.path.abspath(path)) if path and os.path.isfile(path) else None


def _write_task(folder, function, arguments, show, is_live):
    """Write the function, its arguments and the settings to the file that all ranks read."""
    main = _main_program()
    by_value = main is None and getattr(function, "__module__", None) == "__main__"
    if by_value and launch_worker.cloudpickle() is None:
        raise UserError(
            "launch: functions defined in a notebook require cloudpickle, which is not "
            f"installed: {pip_install('notebook')}, or move the function to a module"
        )
    task = {
        "path": [os.path.abspath(entry) for entry in sys.path],  # "" means the current folder
        "argv": list(sys.argv),
        "main": main,
        "show": show,
        "live": is_live,
        "host": platform.node(),
    }
    with open(os.path.join(folder, "task"), "wb") as file:
        pickle.dump(task, file)
        try:
            launch_worker.dump((function, arguments), file, by_value=main is None)
        except Exception as error:
            hint = f" (after {pip_install('notebook')}, more types can be sent)"
            hint = "" if launch_worker.cloudpickle() else hint
            raise UserError(
                f"launch: the function or its arguments cannot be sent: {error}{hint}"
            ) from error


def _raise_error_of_a_rank(job):
    """Raise the error that the lowest failed rank reported."""
    failed = job.failed_ranks()
    if not failed:
        return
    with open(os.path.join(job.folder, f"error-{failed[0]}"), "rb") as file:
        report = pickle.load(file)
    if report["kind"] in ("UserError", "Fault"):
        raise getattr(errors, report["kind"])(report["line"])
    if report["kind"] == "KeyboardInterrupt" and job.is_interrupted:
        raise KeyboardInterrupt
    further = f" (and {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
    ranks = f"rank {report['rank']}{further} of {job.ranks} on {report['host'] or 'its host'}"
    error = RankError(f"{ranks} failed:\n\n{report['text']}", report["rank"], report["host"])
    raise error from _load_exception(report["error"])


def _load_exception(data):
    """Unpickle an exception; return None if there is no exception or unpickling fails."""
    try:
        return None if data is None else launch_worker.load(io.BytesIO(data))
    except Exception:
        return None
