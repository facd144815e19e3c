"""Layers, with one file per family. A new layer is listed only in the `__all__` of its file.

A layer object holds only its arguments. `build` returns the learnables and the state that the layer
needs for a given input shape, and `forward` applies the layer's op. The network stores the arrays.
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
