"""Start a side process: a Python process that serves this process and takes no part in an MPI job.

The side process ends when its stdin ends, so it never outlives the process that has started it.
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
LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_", "SLURM_")
# Schedulers and terminals send these signals to all processes of a job; only ranks react to them.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
NICE = 5  # niceness that gives way to the training


def start(arguments: Sequence[str], **keywords: Any) -> subprocess.Popen:
    """Start Python in a side process.

    The side process does not receive the signals that end a job, not even while Python starts: a
    process inherits blocked signals, so these signals stay blocked.

    Parameters
    ----------
    arguments : sequence of str
        Arguments of Python.
    **keywords
        Arguments of Popen except stdin, which is a pipe.

    Returns
    -------
    Popen
        The side process.

    Raises
    ------
    OSError
        If the side process cannot be started, for example at a limit on the number of processes.
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
