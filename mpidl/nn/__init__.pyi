from mpidl.nn import zoo as zoo
from mpidl.nn.layers.activation import *
from mpidl.nn.layers.base import Built as Built
from mpidl.nn.layers.base import Layer as Layer
from mpidl.nn.layers.base import LayerContext as LayerContext
from mpidl.nn.layers.convolution import *
from mpidl.nn.layers.dense import *
from mpidl.nn.layers.dropout import *
from mpidl.nn.layers.gates import *
from mpidl.nn.layers.group_norm import *
from mpidl.nn.layers.joins import *
from mpidl.nn.layers.normalization import *
from mpidl.nn.layers.pooling import *
from mpidl.nn.layers.recurrent import *
from mpidl.nn.layers.resize import *
from mpidl.nn.layers.shape import *
from mpidl.nn.network import Network as Network
from mpidl.nn.summary import Analysis as Analysis
from mpidl.nn.summary import analyze as analyze
