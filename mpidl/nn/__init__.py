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
from mpidl.nn.network import Network

__all__ = [
    "AveragePool2D",
    "BatchNorm",
    "Built",
    "Conv2D",
    "Dense",
    "Flatten",
    "Layer",
    "MaxPool2D",
    "Network",
    "ReLU",
    "zoo",
]
