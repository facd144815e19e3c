"""MPI of one rank, for machines without mpi4py: as much of `mpi4py.MPI` as this package uses.

A rank alone sends nothing; what a collective call gives it is what it gave.
"""

import importlib
import os
import platform
import sys
import warnings
from types import ModuleType, SimpleNamespace

from mpidl.comm import failure
from mpidl.errors import UserError


def load():
    """The module mpi4py.MPI, which initializes MPI; `MPI` below where there is no mpi4py or it
    finds no MPI. UserError where a launcher started more ranks, which then could not meet."""
    try:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        with warnings.catch_warnings():
            # mpi4py's several lines about what the guard tells in one
            warnings.filterwarnings("ignore", "suspicious MPI execution environment")
            return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        why = _reason(error)
    started = failure.launched_ranks()
    if started is not None:
        raise UserError(
            f"the launcher started {started[1]} tasks ({started[0]}={started[1]}), and for more "
            f"than one rank MPI is needed: {why}"
        )
    return _alone(why)


def _reason(error):
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "mpi4py":
        return "mpi4py is not installed (pip install '.[mpich]', or run/install)"
    return f"mpi4py cannot be used: {' '.join(str(error).split())[:200]}"


class Request:
    """Of a call that was done at once."""

    def Test(self):
        return True

    @staticmethod
    def Testall(requests):
        return True


class Comm:
    """A communicator of this rank alone."""

    rank, size = 0, 1

    def Dup(self):
        return Comm()

    def Split(self, color=0, key=0):
        return Comm()

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


def _alone(why):
    """What stands for the module mpi4py.MPI."""
    library = f"one rank without MPI: {why}"
    names: ModuleType | SimpleNamespace = SimpleNamespace(
        COMM_WORLD=Comm(),
        COMM_SELF=Comm(),
        Request=Request,
        Get_library_version=lambda: library,
        Get_processor_name=platform.node,
        Is_finalized=lambda: False,
        get_vendor=lambda: ("no MPI", (0, 0, 0)),
    )
    for operation in ("SUM", "MIN", "MAX", "LAND", "LOR"):
        setattr(names, operation, operation)  # of one rank's values they all give the same
    return names
