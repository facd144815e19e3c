"""The NumPy functions as a Backend."""

from mpidl.backends.gather import families, gather

REFERENCE = gather("reference", families(__package__))
