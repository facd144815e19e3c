"""Communication between ranks. Only this package calls MPI."""

from mpidl.comm.job_world import World

__all__ = ["World"]
