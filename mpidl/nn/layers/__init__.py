"""Layers, one file per family.

A layer is a set of arguments. `build` returns the learnables and the state that it needs for images
of a shape, and `forward` applies its op. The arrays belong to the network.
"""

from mpidl.nn.layers.activation import LeakyReLU, ReLU, Sigmoid, Softmax, Tanh
from mpidl.nn.layers.base import Built, Layer, LayerContext, Weighted, glorot_uniform
from mpidl.nn.layers.convolution import Conv2D, TransposedConv2D
from mpidl.nn.layers.dense import Dense
from mpidl.nn.layers.dropout import Dropout
from mpidl.nn.layers.joins import Add, Concat
from mpidl.nn.layers.normalization import BatchNorm, CrossChannelNorm
from mpidl.nn.layers.pooling import AveragePool2D, GlobalAveragePool2D, MaxPool2D
from mpidl.nn.layers.shape import Flatten

__all__ = [
    "Add",
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
    "ReLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "TransposedConv2D",
    "Weighted",
    "glorot_uniform",
]
