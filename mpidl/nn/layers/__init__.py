"""Layers, one file per family. A new layer is named in the `__all__` of its family alone.

A layer is a set of arguments. `build` returns the learnables and the state that it needs for images
of a shape, and `forward` applies its op. The arrays belong to the network.
"""

from mpidl.nn.layers.activation import *
from mpidl.nn.layers.base import Built as Built
from mpidl.nn.layers.base import Layer as Layer
from mpidl.nn.layers.base import LayerContext as LayerContext
from mpidl.nn.layers.base import Weighted as Weighted
from mpidl.nn.layers.base import glorot_uniform as glorot_uniform
from mpidl.nn.layers.convolution import *
from mpidl.nn.layers.dense import *
from mpidl.nn.layers.dropout import *
from mpidl.nn.layers.joins import *
from mpidl.nn.layers.normalization import *
from mpidl.nn.layers.pooling import *
from mpidl.nn.layers.shape import *
