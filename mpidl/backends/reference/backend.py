"""Create the Backend REFERENCE from the NumPy functions of this package."""

from mpidl.backends.gather import families, gather

REFERENCE = gather("reference", families(__package__))
