"""Start MPI, and end this process if MPI does not start.

MPI_Init waits for all ranks without a time-out. If a rank is stopped or has already ended, the
other ranks wait forever, and launchers do not always notice. A thread of each rank therefore
watches MPI_Init.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import sys
import threading
import time
from types import ModuleType

from mpidl.errors import UserError
from mpidl.ranks import failure, foreign_launcher, shared_segments, slurm_lines, ulfm
from mpidl.ranks.exit_guard import ENDED_STATES, STOPPED_STATES, status_of

START_SECONDS = 10.0  # extra time after the time-out, because a busy host starts MPI slowly
LOOK_SECONDS = 0.5  # time between two checks of the watching thread
WATCHING_RANKS = 4  # number of ranks per host that check whether another rank has ended
GONE_SECONDS = 1.0  # time from the end of a rank on this host to the end of the job
RDMA_FOLDERS = ("/sys/class/infiniband", "/dev/infiniband")  # Linux creates them for RDMA devices
# Names of the processes of MPICH's and Open MPI's mpirun that start the ranks of a host.
PROXIES = {"hydra_pmi_proxy", "prted", "prterun"}


def initialize(mpi: ModuleType, timeout: float) -> None:
    """Call MPI_Init for the imported module `mpi4py.MPI`.

    During the call, a thread watches MPI_Init. Afterwards, the function restores this process's
    handler of the signal USR1, which MPICH replaces.

    Parameters
    ----------
    mpi : module
        `mpi4py.MPI`, imported without initializing MPI.
    timeout : float
        Longest wait for a message in seconds. If MPI_Init takes longer than this time plus
        `START_SECONDS`, the process prints a line and ends.

    Raises
    ------
    UserError
        If the launcher belongs to another MPI library, or if /dev/shm has too little free space.
    """
    vendor = mpi.get_vendor()[0]
    foreign_launcher.refuse(vendor)
    _, size = shared_segments.local_ranks()
    is_one_host = size == (failure.launched_ranks() or ("", 1))[1]
    try:
        shared_segments.make_room(vendor)
    except UserError as error:
        if not is_one_host:
            _end_all_hosts(error)
        raise
    handler = signal.getsignal(signal.SIGUSR1)
    ulfm.prepare()
    with Watch(timeout), _without_network() if is_one_host else contextlib.nullcontext():
        _init_thread(mpi)
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # so that mpi4py raises exceptions
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, handler)


def _init_thread(mpi):
    """Call MPI_Init_thread without holding the interpreter's lock.

    mpi4py would hold the lock, and other threads, such as the watching thread, could not run.
    """
    try:
        init_thread = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (OSError, AttributeError):  # mpi4py is not linked with a shared MPI library
        mpi.Init_thread(mpi.THREAD_FUNNELED)
        return
    provided = ctypes.c_int()
    with slurm_lines.shortened():
        code = init_thread(None, None, ctypes.c_int(mpi.THREAD_FUNNELED), ctypes.byref(provided))
    if code:
        raise RuntimeError(f"MPI_Init_thread failed with error code {code}")


def without_rdma() -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which MPI can be loaded with fewer file-system calls.

    UCX, which MPICH uses between hosts, reads UCX_MODULES when the library is loaded. On a host
    without RDMA devices, such as InfiniBand, UCX would search for libraries of these devices in
    vain. On other hosts, and if the user has set the variable, the context changes nothing.
    """
    if any(os.path.exists(folder) for folder in RDMA_FOLDERS):
        return contextlib.nullcontext()
    return _variable("UCX_MODULES", "^ib,rdmacm")


def _without_network():
    """Prevent UCX from probing each network device many times."""
    return _variable("UCX_TLS", "^tcp")


@contextlib.contextmanager
def _variable(name, value):
    """Set an environment variable within the block, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _end_all_hosts(error):
    """End the job on all hosts, because ranks on other hosts do not see the error of this host."""
    if shared_segments.local_ranks()[0] == 0:
        print(f"mpidl: {error}", file=sys.stderr, flush=True)
        if "MPI_LOCALNRANKS" in os.environ and "PMI_FD" in os.environ:
            # MPICH's mpirun does not notice a rank that ends before MPI_Init.
            os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=2\n")
    os._exit(2)


class Watch:
    """Context manager that ends this process if its block takes longer than a time-out.

    Time during which this process itself was stopped does not count. The process also ends if the
    launcher has ended. Under mpirun, the process also ends if another rank on this host has ended:
    MPI_Init would wait for that rank, and mpirun may not notice that the rank has ended.

    Parameters
    ----------
    timeout : float
        Longest wait for a message in seconds. The block may take `START_SECONDS` longer.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="MPI start", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self):
        watched_ranks, waited, gone_seconds = _watched_ranks(), 0.0, 0.0
        look_time = time.monotonic()
        while not self._is_over.wait(LOOK_SECONDS):
            previous, look_time = look_time, time.monotonic()
            seconds = min(look_time - previous, 1.0)
            waited += seconds
            if waited > self.timeout + START_SECONDS:
                limit = f"{self.timeout:g} s (--timeout) plus {START_SECONDS:g} s for its start"
                self._end(f"within {limit}{_stopped_ranks()}")
            if failure.launcher_has_ended():
                self._end("because the launcher on this host has ended")
            states = _states_of_ranks() if watched_ranks else {}
            alive = sum(state not in ENDED_STATES for state in states.values())
            is_gone = os.getpid() in states and watched_ranks > alive
            gone_seconds = gone_seconds + seconds if is_gone else 0.0
            if gone_seconds > GONE_SECONDS:
                self._end("because another rank on this host has ended before it started MPI")

    def _end(self, reason):
        """Print a line and end the process, after which the launcher ends the other ranks."""
        rank = failure.launched_rank()
        # If several ranks detect a problem, let the lowest of these ranks print its line.
        if self._is_over.wait(0.3 * min(rank, 10)):
            return
        text = f"mpidl: rank {rank} on host {platform.node()}: MPI did not start {reason}"
        with contextlib.suppress(OSError):  # the launcher reads stderr, and may have ended
            print(text, file=sys.stderr, flush=True)
        os._exit(1)


def _watched_ranks():
    """Return the number of ranks on this host if this process watches them, otherwise 0."""
    rank, count = shared_segments.local_ranks()
    with contextlib.suppress(OSError):
        if rank < WATCHING_RANKS and _read(f"/proc/{os.getppid()}/comm").strip() in PROXIES:
            return count
    return 0


def _states_of_ranks():
    """Return {process ID: state} of this process and its siblings; states as in /proc/PID/stat."""
    parent, states = os.getppid(), {}
    with contextlib.suppress(OSError):
        for pid in _read(f"/proc/{parent}/task/{parent}/children").split():
            states[int(pid)] = status_of(pid)[0]
    return states


def _stopped_ranks():
    """Return text that lists the sibling processes stopped by a signal; "" if there are none."""
    stopped = [str(pid) for pid, state in _states_of_ranks().items() if state in STOPPED_STATES]
    return f": stopped on this host: process {', '.join(stopped)}" if stopped else ""


def _read(path):
    with open(path) as file:
        return file.read()
