"""Prepare a command before NumPy and MPI load: handle signals, and import with few system calls.

A scheduler may send the signals USR1 or TERM while a command still imports its modules. By default,
these signals would kill the rank. Commands that stop with a checkpoint therefore first install
handlers that store the name of the signal. `failure.Signals` reads this name later.

For each module, Python accesses the file system six times: once for the status of the folder, twice
for the status of the file, once to open the bytecode, and twice for the status of the bytecode. If
thousands of ranks start at the same time, these accesses slow a parallel file system. In a command,
this module reduces the six accesses to two.

In other programs, this module changes nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

# The commands that use `failure.Signals`.
STOPPABLE = ("train", "sweep", "scaling", "pack", "launch")
NUMBERS = (signal.SIGUSR1, signal.SIGTERM)

# The user's value of OMP_NUM_THREADS, which the package replaces when it is imported.
omp_num_threads = os.environ.get("OMP_NUM_THREADS", "")
early_signal: str | None = None  # name of the last signal that `note` received

# Private parts of CPython, which exist at least in versions 3.10 to 3.14. If they are missing,
# imports are not changed.
_importer: Any = sys.modules.get("_frozen_importlib_external")
_has_parts = hasattr(_importer, "_path_stat") and hasattr(_importer, "FileLoader")
_usual = (_importer._path_stat, _importer.FileLoader.get_data) if _has_parts else None


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
    """Prepare this process if it runs a command: set signal handlers, and speed up imports.

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
    if name is not None and _usual is not None:
        _importer._path_stat = _remembering(_importer._path_stat)
        _importer.FileLoader.get_data = _read_file


def end_imports() -> None:
    """Restore Python's usual imports, because files may change from now on."""
    if _usual is not None:
        _importer._path_stat, _importer.FileLoader.get_data = _usual


def note(number: int, frame: object) -> None:
    """Store the name of a signal for `failure.Signals`."""
    global early_signal
    early_signal = signal.Signals(number).name


def end() -> None:
    """Ignore further signals, because they would change the exit code of the ended command."""
    for number in NUMBERS:
        if signal.getsignal(number) is note:
            signal.signal(number, signal.SIG_IGN)


def _remembering(ask):
    """Return a function that caches the result of ask(path). Exceptions are not cached."""
    answers = {}

    def status(path):
        if path not in answers:
            answers[path] = ask(path)
        return answers[path]

    return status


def _read_file(loader, path):
    """Return the bytes of a file, as a replacement for the method `get_data` of a loader."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)
