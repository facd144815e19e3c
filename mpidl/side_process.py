"""Start a Python process beside this one, which serves this process and is not part of an MPI job.

The process ends when its stdin ends, so it never outlives the process that has started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# Prefixes of the variables that MPI launchers set. If a library such as h5py loads MPI, they would
# make the process act as a rank.
LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_", "SLURM_")
# Schedulers and terminals send these to all processes of a job; only the ranks react to them.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
NICE = 5  # niceness that gives way to the training


def start(arguments: Sequence[str], **keywords: Any) -> subprocess.Popen:
    """Start Python beside this process.

    The process does not receive the signals that end a job, not even while Python starts: they stay
    blocked, because a process inherits blocked signals.

    Parameters
    ----------
    arguments : sequence of str
        Arguments of Python.
    **keywords
        Arguments of Popen except stdin, which is a pipe.

    Returns
    -------
    Popen
        The process.

    Raises
    ------
    OSError
        If it cannot be started, such as at a limit on the number of processes.
    """
    environment = {name: v for name, v in os.environ.items() if not name.startswith(LAUNCHERS)}
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            **keywords,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def give_way() -> None:
    """Let this process run on any core, and let the training go first."""
    os.nice(NICE)
    with contextlib.suppress(OSError, AttributeError):  # leave the core to which rank 0 is bound
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
