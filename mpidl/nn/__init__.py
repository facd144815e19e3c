"""Networks: layers, the network that holds their learnables and state, and the zoo."""

from mpidl.nn import zoo
from mpidl.nn.layers import (
    Add,
    AveragePool2D,
    BatchNorm,
    Built,
    Concat,
    Conv2D,
    CrossChannelNorm,
    Dense,
    Dropout,
    Flatten,
    GlobalAveragePool2D,
    Layer,
    LayerContext,
    LeakyReLU,
    MaxPool2D,
    ReLU,
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
    "LayerContext",
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
