"""Optimizers, which are chains of gradient transforms that can also be used individually."""

import sys

from mpidl.lazy import LazyPackage

sys.modules[__name__].__class__ = LazyPackage
