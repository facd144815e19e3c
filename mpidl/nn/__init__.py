"""Networks: layers, the class `Network`, and the zoo of predefined networks."""

import sys

from mpidl.lazy import LazyPackage

sys.modules[__name__].__class__ = LazyPackage
