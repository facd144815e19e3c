"""End all ranks of a job together after exceptions and signals."""

from __future__ import annotations

import atexit
import math
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mpidl import startup
from mpidl.errors import Fault, UserError
from mpidl.ranks import ulfm
from mpidl.ranks.departure import LEAVING, OPERATION, Departure, start_exit_guard

if TYPE_CHECKING:
    from mpidl.ranks.job_guard import JobTransport

# For each launcher, {variable with the number of tasks: variable with the index of this task}.
LAUNCHERS = {
    "PMI_SIZE": "PMI_RANK",
    "PMIX_SIZE": "PMIX_RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}


def launched_ranks() -> tuple[str, int] | None:
    """Return (variable, number of ranks) if a launcher started several ranks, else None."""
    for variable in LAUNCHERS:
        tasks = os.environ.get(variable, "")
        if tasks.isdigit() and int(tasks) > 1:
            return variable, int(tasks)
    return None


def launched_rank() -> int:
    """Return this process's rank from environment variables of the launcher; 0 without a launcher.

    This function can be called before a `World` exists.
    """
    return next((int(os.environ[v]) for v in LAUNCHERS.values() if v in os.environ), 0)


_parent = os.getppid()  # the launcher on this host, if a launcher started this process


def launcher_has_ended() -> bool:
    """Return whether the launcher on this host has ended while its ranks are still running.

    This happens if the launcher is killed. The result is always False for a single rank.
    """
    return launched_ranks() is not None and os.getppid() != _parent


class Job:
    """The job of this process; `transport` is that of its largest world, or None before a world."""

    transport: JobTransport | None = None

    @property
    def rank(self) -> int:
        return launched_rank() if self.transport is None else self.transport.rank


job = Job()


def abort_on_exception(transport: JobTransport) -> None:
    """End the job on all ranks after an uncaught exception on this rank.

    If there are several ranks, install an exception hook and an exit function. The exit function
    waits for the other ranks.
    """
    previous_size = 0 if job.transport is None else job.transport.size
    if transport.size > previous_size:  # keep the transport of a larger world
        job.transport = transport
    if transport.size == 1 or previous_size > 1:
        return
    sys.excepthook = _abort
    atexit.register(_leave_together)


def replace_transport(old: JobTransport, new: JobTransport) -> None:
    """After a loss of ranks, let the hook and the exit function use the new transport."""
    if job.transport is old:
        job.transport = new


def _abort(kind, error, trace):
    """Print an uncaught exception, and end the job."""
    transport = job.transport
    assert transport is not None
    if transport.rank:
        # If all ranks fail, rank 0 prints its error and ends the other ranks.
        time.sleep(min(2.0, transport.timeout / 2))
    own_rank = f"mpidl: {transport.name_of(transport.rank)}"
    if ulfm.is_loss(error, transport.comm):
        names = ", ".join(map(transport.name_of, ulfm.lost_ranks(transport.comm)))
        print(f"{own_rank}, {transport.activity}: lost {names or 'a rank'}", file=sys.stderr)
    else:
        text = "".join(traceback.format_exception(kind, error, trace))
        print(f"{own_rank} failed, {transport.activity}:\n{text}", file=sys.stderr, end="")
    transport.abort(1)


def _leave_together():
    """At exit, wait for the other ranks, so that no rank waits for a rank that has ended."""
    transport = job.transport
    assert transport is not None
    if transport.MPI.Is_finalized():
        return
    if not transport.has_left:
        transport.activity = LEAVING
        _meet(transport, progress=Departure(transport).look)
    if transport.has_left and not ulfm.lost_ranks(transport.MPI.COMM_WORLD):
        # After a cancelled wait or a loss of ranks, the process ends without finalizing MPI.
        start_exit_guard(transport)
        transport.finalize()


def run(main: Callable[[], int]) -> None:
    """Run the `main` function of a command, and end the process with the exit code of `main`.

    After a UserError, the process prints one line to stderr and exits with code 2. After a Fault,
    it prints one line and exits with code 1. If all ranks raise the error, only rank 0 prints it.
    If a single rank raises the error, that rank prints it and ends the job. After a
    KeyboardInterrupt, for example from a second SIGINT, the process prints one line and ends the
    job at once. If a rank calls sys.exit with a nonzero code while other ranks continue, the job
    ends with this code. If nobody reads the output of a command without ranks, as after `| head`,
    the process ends silently.
    """
    try:
        code = main()
        if sys.stdout is not None:  # None if the process was started with a closed stdout
            sys.stdout.flush()
    except BrokenPipeError:
        if job.transport is not None or not _reader_has_ended():
            raise
        code = 1
    except (UserError, Fault) as error:
        code, transport = 2 if isinstance(error, UserError) else 1, job.transport
        if job.rank == 0:
            _print_error(str(error))
        if transport is not None:
            lowest = _meet(transport, failed=True, seconds=min(5.0, transport.timeout / 2))
            if job.rank and lowest in (None, job.rank):
                _print_error(f"rank {job.rank}: {error}")
            if lowest is None:
                transport.abort(code)
    except KeyboardInterrupt:
        code, transport = 1, job.transport
        _print_error(f"rank {job.rank} was interrupted" if job.rank else "interrupted")
        if transport is not None and transport.size > 1:
            transport.abort(code)
    except SystemExit as end:  # from --help, or from user code
        code, transport = _exit_code(end), job.transport
        if code and transport is not None:
            seconds = min(3.0, transport.timeout / 2)
            if _meet(transport, failed=True, seconds=seconds) is None:
                _print_error(f"{transport.name_of(job.rank)} has exited with code {code}")
                transport.abort(code)
    startup.end()
    sys.exit(code)


def _reader_has_ended():
    """Return whether the reader of stdout has ended, as in `| head`, and then write nowhere."""
    try:
        number = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # not a file of the system
        return False
    poll = select.poll()
    poll.register(number, 0)  # poll always reports errors
    # A socket reports that its reader has hung up.
    has_ended = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if has_ended:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # Python flushes at exit
    return has_ended


def _exit_code(end):
    """Return the exit code of a SystemExit; print a string argument, as Python does."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr, flush=True)
    return 1


def _print_error(text):
    print(f"mpidl: {text}", file=sys.stderr, flush=True)


def _meet(transport, failed=False, seconds=math.inf, progress=None):
    """Wait until all ranks are about to exit, and return the lowest rank that failed.

    The result is the number of ranks if no rank failed, and None if a rank is missing after
    `seconds`. By default, the wait has no time-out, because other ranks may have work to finish. If
    another rank times out while it waits for this rank, that rank's error message names this rank.
    """
    failed_rank = np.array([transport.rank if failed else transport.size])
    lowest = np.empty(1, int)
    deadline = time.monotonic() + seconds

    def is_over():
        transport.has_left = transport.has_left or request.Test()
        return transport.has_left or time.monotonic() > deadline

    try:
        request = transport.control.Iallreduce(failed_rank, lowest, transport.MPI.MIN)
        transport.wait_until(is_over, OPERATION, progress, math.inf)
    except Exception as error:
        if not ulfm.is_loss(error, transport.control):
            raise
        transport.control.Revoke()  # make the other ranks stop waiting too
    return int(lowest[0]) if transport.has_left else None


NOTED = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class Signals:
    """Context manager in which SIGUSR1, SIGTERM and SIGINT request a stop.

    Within the context, these signals do not end the process, but a second SIGINT raises
    KeyboardInterrupt. If contexts of this class are nested, a signal requests a stop in all of
    them. A signal that arrived while the command was starting (`startup.note`) also requests a
    stop. Entering the context again has no effect.

    Attributes
    ----------
    name : str or None
        Name of the last signal that this rank received, or of the request that `look` found. None
        if this rank has no stop request.
    agreed : bool
        Whether the ranks have agreed to stop. They decide this between two mini-batches.
    look : callable or None
        Function that checks for another kind of stop request, such as a file, and returns the name
        of the request, or None.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.agreed = False
        self.look: Callable[[], str | None] | None = None
        self._previous_handlers = {}

    def __enter__(self) -> Signals:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self.is_active:
            for number in NOTED:
                self._previous_handlers[number] = signal.signal(number, self._note)
            if self._previous_handlers[signal.SIGTERM] is startup.note:
                self.name = self.name or next(reversed(startup.early_signals), None)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous_handlers.items():
            contexts = list(_contexts(number))
            place = contexts.index(self) if self in contexts else None
            if place == 0:
                signal.signal(number, handler)
            elif place is not None:  # a context that was entered later is still active
                contexts[place - 1]._previous_handlers[number] = handler
        self._previous_handlers = {}

    @property
    def is_active(self) -> bool:
        """Whether signals reach this context."""
        return self in _contexts(signal.SIGTERM)

    def is_requested(self) -> bool:
        """Call `look` if it is set, and return whether this rank has received a stop request."""
        if self.name is None and self.look is not None:
            request = self.look()
            if request is not None:  # otherwise keep the name that a signal may have just set
                self.name = request
        return self.name is not None

    def _note(self, number, frame):
        """Record a signal; raise KeyboardInterrupt at a second SIGINT."""
        if number == signal.SIGINT and self.name == "SIGINT":
            raise KeyboardInterrupt
        for context in _contexts(number):
            context.name = signal.Signals(number).name


def _contexts(number):
    """Yield the active contexts of `Signals`, from the innermost to the outermost."""
    handler = signal.getsignal(number)
    while isinstance(context := getattr(handler, "__self__", None), Signals):
        yield context
        handler = context._previous_handlers.get(number)


def agreed_signal(signals, world):
    """Return the name of the signal if the ranks have agreed to stop, else None. Collective."""
    if not signals.agreed:
        return None
    return next(name for name in world.broadcast(world.gather(signals.name)) if name)
