"""Layers of networks. Each file defines one family of layers.

A layer object holds only its arguments. `build` returns the learnables and the state that the layer
needs for a given input shape, and `forward` applies the layer's op. The network stores the arrays.
To export a new layer, add its name to `__all__` in the file of its family.
"""

import sys

from mpidl.lazy import LazyPackage

sys.modules[__name__].__class__ = LazyPackage
