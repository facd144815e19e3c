"""Collect the NumPy functions into the Backend REFERENCE."""

from mpidl.backends.gather import families, gather

REFERENCE = gather("reference", families(__package__))
