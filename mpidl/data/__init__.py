"""Open image sets, transform their images and deliver them in mini-batches."""

import sys

from mpidl.lazy import LazyPackage

sys.modules[__name__].__class__ = LazyPackage
