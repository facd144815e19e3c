"""Ends a job on all its ranks, or on none: exceptions, signals, launchers of another MPI."""

import atexit
import math
import os
import signal
import sys
import threading
import time
import traceback

import numpy as np

from mpidl.errors import Fault, UserError

# what launchers say of the number of tasks, and of which one this is
LAUNCHERS = {
    "PMI_SIZE": "PMI_RANK",
    "PMIX_SIZE": "PMIX_RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}


def launched_ranks():
    """(variable, number) where a launcher says that it started more than one rank, else None."""
    for variable in LAUNCHERS:
        tasks = os.environ.get(variable, "")
        if tasks.isdigit() and int(tasks) > 1:
            return variable, int(tasks)
    return None


def refuse_foreign_launcher(size, library):
    """Stop N jobs of one rank, which is what the `mpirun` of another MPI makes of one of N."""
    started = launched_ranks()
    if size == 1 and started is not None:
        variable, tasks = started
        raise UserError(
            f"the launcher started {tasks} tasks ({variable}={tasks}), but MPI sees one rank: "
            f"expected the launcher of {library.split(',')[0].splitlines()[0].strip()}, such "
            f"as {os.path.join(os.path.dirname(sys.executable), 'mpirun')}"
        )


_net = None  # the Net of the largest world of this process, once there is one


def watch(net):
    """Have an uncaught exception on this rank end the job on all of them, within seconds."""
    global _net
    before = 0 if _net is None else _net.size
    if net.size > before:  # a world of fewer ranks beside it does not take its place
        _net = net
    if net.size == 1 or before > 1:
        return

    def hook(kind, error, trace):
        if net.rank:
            time.sleep(2)  # if all ranks fail alike, rank 0 speaks and ends the others
        head = f"mpidl: rank {net.rank} on host {net.hosts[net.rank]} failed, {net.doing}:"
        text = "".join(traceback.format_exception(kind, error, trace))
        print(f"{head}\n{text}", file=sys.stderr, end="", flush=True)
        net.abort(1)

    sys.excepthook = hook
    atexit.register(_leave_together)


def _leave_together():
    """At exit, wait for the other ranks; a rank that left alone would leave them waiting."""
    net = _net
    if net.MPI.Is_finalized() or net.left:
        return
    net.doing = "leaving"
    _meet(net)


def run(main):
    """Run a command's main() and end the process with the exit code it returns.

    A UserError is one line on stderr and exit code 2, a Fault one and exit code 1. Most are raised
    by all ranks, and rank 0 speaks; one that a single rank raised is told by that rank, which then
    ends the job. A second INT is one line too, and ends it at once.
    """
    try:
        code = main()
    except (UserError, Fault) as error:
        code = 2 if isinstance(error, UserError) else 1
        rank = launched_rank() if _net is None else _net.rank
        if rank == 0:
            _say(str(error))
        if _net is not None:
            lowest = _meet(_net, failed=True, seconds=min(5.0, _net.timeout / 2))
            if rank and lowest in (None, rank):
                _say(f"rank {rank}: {error}")
            if lowest is None:
                _net.abort(code)
    except KeyboardInterrupt:
        code, rank = 1, launched_rank() if _net is None else _net.rank
        _say(f"rank {rank} was interrupted" if rank else "interrupted")
        if _net is not None and _net.size > 1:
            _net.abort(code)
    sys.exit(code)


def _say(text):
    print(f"mpidl: {text}", file=sys.stderr, flush=True)


def launched_rank():
    """This process's rank before there is a world, as the launcher tells it."""
    return next((int(os.environ[v]) for v in LAUNCHERS.values() if v in os.environ), 0)


def _meet(net, failed=False, seconds=math.inf):
    """Wait for all ranks to leave; the lowest that failed, net.size where none did.

    None where they have not all come after some seconds. A rank that leaves early has no time-out:
    the others may have work to finish, and where they wait for it, theirs names it.
    """
    mine, lowest = np.array([net.rank if failed else net.size]), np.empty(1, int)
    request = net.control.Iallreduce(mine, lowest, net.MPI.MIN)
    deadline = time.monotonic() + seconds

    def met():
        net.left = net.left or request.Test()
        return net.left or time.monotonic() > deadline

    net.until(met, "the end of the program on all ranks", timeout=math.inf)
    return int(lowest[0]) if net.left else None


class Signals:
    """While entered, USR1, TERM and INT ask for a stop instead of ending the process.

    `name` is the signal that came to this rank, or None; the ranks agree on it between steps. A
    second INT interrupts at once.
    """

    def __init__(self):
        self.name, self.agreed, self.before = None, False, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
                self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number, frame):
        if number == signal.SIGINT and self.name == "SIGINT":
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
