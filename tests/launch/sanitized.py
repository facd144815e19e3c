"""A pytest plugin: arrays use NumPy's memory, whose bounds AddressSanitizer checks."""

from mpidl.backends.cpu import arenas

arenas.SMALL = 1 << 60
