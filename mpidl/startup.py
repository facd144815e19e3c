"""Handle signals that arrive while a command starts.

A scheduler may send the signals USR1 or TERM while a command still imports its modules. By default,
these signals would kill the rank. Commands that stop with a checkpoint therefore first install
handlers that store the name of the signal. `failure.Signals` reads this name later.

In other programs, this module changes nothing.
"""

import os
import signal
import sys

# The commands that use `failure.Signals`.
STOPPABLE = ("train", "sweep", "scaling", "pack", "launch")
NUMBERS = (signal.SIGUSR1, signal.SIGTERM)

# The user's value of OMP_NUM_THREADS, which the package replaces when it is imported.
omp_num_threads = os.environ.get("OMP_NUM_THREADS", "")
# Environment variables of all processes of a job under mpidl.launch.
JOB_TOKEN = "MPIDL_JOB_TOKEN"  # the same value if the job starts again
JOB_START = "MPIDL_JOB_START"  # how many times the job was started

early_signals: list[str] = []  # names of the signals that `note` has received


def command() -> str | None:
    """Return the name of the mpidl command that this process runs, or None in another program.

    ``python -m mpidl.train`` imports the package before the module. At that time, sys.argv[0] is
    still "-m".
    """
    program = sys.modules.get("mpidl_command")
    if program is not None and program.command:
        return program.command
    if sys.argv[:1] != ["-m"]:
        return None
    package, _, name = sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")
    if package != "mpidl":
        return None
    if "." in name:  # a side process of a command
        return None
    return name or next(iter(sys.argv[1:]), None)  # "python -m mpidl train"


def begin() -> None:
    """Set signal handlers if this process runs a command that can stop with a checkpoint.

    ``env --block-signal=USR1,TERM python -m mpidl.train`` blocks the signals before Python starts.
    Blocked signals stay pending. This function sets the handlers and then unblocks the signals.
    """
    name = command()
    if name in STOPPABLE:
        for number in NUMBERS:
            signal.signal(number, note)
            signal.siginterrupt(number, False)  # restart interrupted system calls of MPI_Init
    if name is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


def note(number: int, frame: object) -> None:
    """Store the name of a signal for `failure.Signals`."""
    early_signals.append(signal.Signals(number).name)


def end() -> None:
    """Ignore further signals, because they would change the exit code of the ended command."""
    for number in NUMBERS:
        if signal.getsignal(number) is note:
            signal.signal(number, signal.SIG_IGN)
