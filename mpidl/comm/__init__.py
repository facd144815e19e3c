"""Communication between ranks. Only this package calls MPI."""

from mpidl.comm.world import World

__all__ = ["World"]
