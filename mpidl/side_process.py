"""Start a side process: a Python process that works for this process but is not an MPI rank.

The side process ends when its stdin ends. It therefore never outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# Prefixes of the variables that MPI launchers set. If a library such as h5py loads MPI, these
# variables would make the side process act as a rank.
LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_")
# Schedulers and terminals send these signals to all processes of a job. Only ranks must react.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
NICE = 5  # niceness of the side process, so that the training has priority


def start(arguments: Sequence[str], **keywords: Any) -> subprocess.Popen:
    """Start Python in a side process.

    The signals that end a job are blocked in the side process, even while Python starts, because a
    process inherits blocked signals.

    Parameters
    ----------
    arguments : sequence of str
        Arguments of Python.
    **keywords
        Arguments of Popen, except for stdin, which is a pipe.

    Returns
    -------
    Popen
        The side process.

    Raises
    ------
    OSError
        If the side process cannot be started, for example because of a limit on processes.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
            **keywords,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def environment() -> dict[str, str]:
    """Return this process's environment without the variables of launchers and of Slurm."""
    prefixes = (*LAUNCHERS, "SLURM_")
    return {name: v for name, v in os.environ.items() if not name.startswith(prefixes)}


def give_way() -> None:
    """Give this process a lower priority than the training, and let it run on any core."""
    os.nice(NICE)
    with contextlib.suppress(OSError, AttributeError):  # otherwise it shares the core of rank 0
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
