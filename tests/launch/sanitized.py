"""Pytest plugin that allocates arrays in NumPy's memory, which AddressSanitizer checks."""

from mpidl.backends.cpu import arenas

arenas.SMALL = 1 << 60
