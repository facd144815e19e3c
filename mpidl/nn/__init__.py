"""Networks: layers, the network that holds their learnables and state, and the zoo."""

from mpidl.nn import zoo
from mpidl.nn.layers import (
    AveragePool2D,
    BatchNorm,
    Built,
    Conv2D,
    Dense,
    Flatten,
    Layer,
    MaxPool2D,
    ReLU,
)
from mpidl.nn.more_layers import (
    Add,
    Concat,
    CrossChannelNorm,
    Dropout,
    GlobalAveragePool2D,
    LeakyReLU,
    Sigmoid,
    Softmax,
    Tanh,
    TransposedConv2D,
)
from mpidl.nn.network import Network
from mpidl.nn.summary import Analysis, analyze

__all__ = [
    "Add",
    "Analysis",
    "AveragePool2D",
    "BatchNorm",
    "Built",
    "Concat",
    "Conv2D",
    "CrossChannelNorm",
    "Dense",
    "Dropout",
    "Flatten",
    "GlobalAveragePool2D",
    "Layer",
    "LeakyReLU",
    "MaxPool2D",
    "Network",
    "ReLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "TransposedConv2D",
    "analyze",
    "zoo",
]
