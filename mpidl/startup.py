"""Take signals from the first instruction of a command, before NumPy and MPI load.

A scheduler may send USR1 or TERM while a command still imports its modules. Their default action
would kill the rank. The commands that stop with a checkpoint therefore note these signals first of
all, and `failure.Signals` finds the note when it takes over. In a user's program this module
changes nothing.
"""

from __future__ import annotations

import os
import signal
import sys

STOPPABLE = ("train", "sweep", "scaling", "pack")  # the commands that use `failure.Signals`
NUMBERS = (signal.SIGUSR1, signal.SIGTERM)

# The user's value of OMP_NUM_THREADS, which the package replaces when it is imported.
omp_num_threads = os.environ.get("OMP_NUM_THREADS", "")
early_signal: str | None = None  # name of the last signal that `note` received


def command() -> str | None:
    """Return the name of the command that this process runs, or None in another program.

    Python imports the package before the module of ``python -m mpidl.train``. At that time
    sys.argv[0] is still "-m".
    """
    program = sys.modules.get("mpidl_command")
    if program is not None and program.command:
        return program.command
    if sys.argv[:1] != ["-m"]:
        return None
    package, _, name = sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")
    if package != "mpidl":
        return None
    return name or next(iter(sys.argv[1:]), None)  # "python -m mpidl train"


def begin() -> None:
    """Note signals if this process runs a command, and let pending signals in.

    ``env --block-signal=USR1,TERM python -m mpidl.train`` blocks the signals before Python starts.
    They stay pending until this function has set the handlers.
    """
    name = command()
    if name in STOPPABLE:
        for number in NUMBERS:
            signal.signal(number, note)
            signal.siginterrupt(number, False)  # MPI_Init restarts its system calls
    if name is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


def note(number: int, frame: object) -> None:
    """Remember a signal for `failure.Signals`."""
    global early_signal
    early_signal = signal.Signals(number).name


def end() -> None:
    """Ignore further signals, which would change the exit code of a command that has ended."""
    for number in NUMBERS:
        if signal.getsignal(number) is note:
            signal.signal(number, signal.SIG_IGN)
