"""A plugin of pytest: memory is NumPy's own, whose bounds AddressSanitizer watches."""

from mpidl.backends.cpu import arenas

arenas.SMALL = 1 << 60
