"""Load `mpi4py.MPI`, or a substitute for a single rank on machines without mpi4py.

The substitute defines only the names that this package uses. Every collective operation returns
the value of the only rank.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from types import ModuleType, SimpleNamespace

from mpidl.errors import UserError
from mpidl.ranks import failure, mpi_start, ulfm
from mpidl.text import pip_install


def load(timeout: float = 300.0) -> ModuleType | SimpleNamespace:
    """Import `mpi4py.MPI` and initialize MPI, or return the substitute for one rank.

    Parameters
    ----------
    timeout : float
        Longest wait for the start of MPI in seconds; see `mpi_start.initialize`.

    Returns
    -------
    module
        `mpi4py.MPI`, or the substitute if mpi4py is not installed or cannot load an MPI library.

    Raises
    ------
    UserError
        If MPI cannot be loaded and a launcher started several tasks, or if MPI cannot start.
    """
    try:
        with mpi_start.without_rdma():
            import mpi4py

            # These settings take effect only if they precede the first import of mpi4py.MPI.
            mpi4py.rc.thread_level, mpi4py.rc.initialize = "funneled", False
            # MPI_Finalize may hang after the loss of a rank.
            mpi4py.rc.finalize = not ulfm.is_enabled()
            mpi = importlib.import_module("mpi4py.MPI")
        if not mpi.Is_initialized():
            mpi_start.initialize(mpi, timeout)
        return mpi
    except (ImportError, RuntimeError) as error:
        reason = _reason_of(error)
    started = failure.launched_ranks()
    if started is not None:
        raise UserError(
            f"the launcher started {started[1]} tasks ({started[0]}={started[1]}), but more than "
            f"one rank requires MPI: {reason}"
        )
    return _serial_mpi(reason)


def _reason_of(error):
    """Return text that says why mpi4py could not be imported."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "mpi4py":
        return f"mpi4py is not installed ({pip_install('mpich')}, or run/install)"
    return f"mpi4py cannot be used: {' '.join(str(error).split())[:200]}"


class Request:
    """A request for an operation that is already complete."""

    def Test(self):
        return True

    @staticmethod
    def Testall(requests):
        return True


class Comm:
    """A communicator with a single rank."""

    rank, size = 0, 1

    def Dup(self):
        return Comm()

    def Split(self, color=0, key=0):
        return Comm()

    def Free(self):
        pass

    def allgather(self, value):
        return [value]

    def Iallreduce(self, array, out, operation=None):
        out[...] = array
        return Request()

    def Ibarrier(self):
        return Request()

    def barrier(self):
        pass

    def Iprobe(self, source=-1, tag=-1):
        return False

    def Abort(self, code=1):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serial_mpi(reason):
    """Return the substitute for `mpi4py.MPI`; `reason` says why mpi4py cannot be used."""
    library = f"one rank without MPI: {reason}"
    namespace = SimpleNamespace(
        COMM_WORLD=Comm(),
        COMM_SELF=Comm(),
        Request=Request,
        Get_library_version=lambda: library,
        Get_processor_name=platform.node,
        Is_finalized=lambda: False,
        get_vendor=lambda: ("no MPI", (0, 0, 0)),
    )
    for operation in ("SUM", "MIN", "MAX", "LAND", "LOR"):
        setattr(namespace, operation, operation)  # on one rank, all operations are the same
    return namespace
