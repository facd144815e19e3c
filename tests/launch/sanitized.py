"""A plugin of pytest: memory is NumPy's own, whose bounds AddressSanitizer watches."""

from mpidl.backends import memory

memory.SMALL = 1 << 60
