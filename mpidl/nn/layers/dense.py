"""Fully connected layers."""

import math
from dataclasses import dataclass

import numpy as np

from mpidl import ops
from mpidl.nn.layers.base import Built, Weighted, glorot_uniform
from mpidl.ops import check


@dataclass
class Dense(Weighted):
    """Fully connected: `outputs` numbers of all features of an image (flattened if need be).

    Glorot uniform weights, zero bias; their factors: see `Weighted`.
    """

    outputs: int
    name: str | None = None

    def build(self, shape):
        features = int(np.prod(shape))
        check.integer(self.name, "outputs", self.outputs)
        return Built(
            (self.outputs,),
            {
                "weight": ((self.outputs, features), glorot_uniform(features, self.outputs)),
                "bias": ((self.outputs,), 0.0),
            },
        )

    def forward(self, x, at):
        x = ops.flatten(x) if len(x.shape) > 2 else x
        return ops.dense(x, at["weight"], at["bias"])

    def multiply_adds(self, shape, output_shape):
        return math.prod(shape) * self.outputs
