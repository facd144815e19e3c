"""Create the Backend CPU from this package; the NumPy backend provides the missing functions."""

from mpidl.backends.gather import families, gather
from mpidl.backends.reference.backend import REFERENCE

CPU = gather("cpu", families(__package__), fallback=REFERENCE, fuses_convolutions=True)
