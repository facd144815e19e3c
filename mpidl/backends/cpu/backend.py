"""The C kernels as a Backend. NumPy computes the functions that no module here defines."""

from mpidl.backends.gather import families, gather
from mpidl.backends.reference.backend import REFERENCE

CPU = gather("cpu", families(__package__), fallback=REFERENCE, fuses_convolutions=True)
