"""Layers of networks. Each file defines one family of layers.

A layer object holds only its arguments. `build` returns the learnables and the state that the layer
needs for a given input shape, and `forward` applies the layer's op. The network stores the arrays.
To export a new layer, add its name to `__all__` in the file of its family.
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
