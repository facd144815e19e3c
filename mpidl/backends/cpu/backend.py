"""Collect the functions of this package into the Backend CPU; NumPy provides the others."""

from mpidl.backends.gather import families, gather
from mpidl.backends.reference.backend import REFERENCE

CPU = gather("cpu", families(__package__), fallback=REFERENCE, fuses_convolutions=True)
