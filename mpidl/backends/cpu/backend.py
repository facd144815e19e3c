"""Collect this package's functions into the Backend CPU; the NumPy backend provides the rest."""

from mpidl.backends.gather import families, gather
from mpidl.backends.reference.backend import REFERENCE

CPU = gather("cpu", families(__package__), fallback=REFERENCE, fuses_convolutions=True)
