"""Write and read the results of runs: console output, metrics, history, plots, arrays and pages."""

import sys

from mpidl.lazy import LazyPackage

sys.modules[__name__].__class__ = LazyPackage
