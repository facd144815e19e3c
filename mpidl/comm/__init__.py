"""What goes between ranks. The only package that talks to MPI."""

from mpidl.comm.world import World

__all__ = ["World"]
