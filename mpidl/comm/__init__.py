"""Communication between ranks. Only this package calls MPI."""

import sys

from mpidl.lazy import LazyPackage

sys.modules[__name__].__class__ = LazyPackage
