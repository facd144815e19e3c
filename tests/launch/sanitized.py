"""Pytest plugin that lets arrays use NumPy's memory, so that AddressSanitizer checks bounds."""

from mpidl.backends.cpu import arenas

arenas.SMALL = 1 << 60
