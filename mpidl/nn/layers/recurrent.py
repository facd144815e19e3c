"""Recurrent layers: LSTM and GRU over the rows of images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mpidl import ops
from mpidl.nn.layers.base import (
    STORED,
    Built,
    Initial,
    LayerContext,
    Shape,
    Value,
    Weighted,
    glorot_uniform,
    layer_class,
)
from mpidl.ops import check
from mpidl.ops.recurrent import KINDS, Returns, check_returns, check_truncate

__all__ = ["GRU", "LSTM"]


@dataclass
class _Recurrent(Weighted):
    """Base class of recurrent layers. An image (C, H, W) is a sequence of H steps.

    Parameters
    ----------
    units
        Number of hidden units, which is the number of outputs per step.
    returns
        With "sequence", the layer returns the outputs of all steps, an image (units, H, 1). With
        "last", it returns those of the last step, features (units,).
    reverse
        Whether the last row is the first step. A `Concat` of a layer and of one in reverse is a
        bidirectional layer.
    truncate
        Number of steps of a chunk for truncated backpropagation: the state of an image passes from
        chunk to chunk, and the gradient does not. By default, the gradient passes through all
        steps.
    recurrent_weight_learn_rate_factor, recurrent_weight_l2_factor
        Factors by which the optimizer's learning rate and L2 regularization are multiplied for the
        recurrent weight.

    Notes
    -----
    `Weighted` describes the other arguments. Initial weights are Glorot uniform: the input weights
    of all gates together, and the recurrent weights for each gate.
    """

    units: int

    returns: Returns = field(default="sequence", kw_only=True, metadata=STORED)
    reverse: bool = field(default=False, kw_only=True)
    truncate: int | None = field(default=None, kw_only=True)
    recurrent_weight_learn_rate_factor: float = field(default=1.0, kw_only=True)
    recurrent_weight_l2_factor: float = field(default=1.0, kw_only=True)

    kind: ClassVar[str]

    def build(self, shape: Shape) -> Built:
        check.integer(self.name, "units", self.units)
        check_truncate(self.name, self.truncate)
        check_returns(self.name, self.returns)
        if len(shape) != 3:
            raise ValueError(
                f"{self.name}: expected images (C, H, W), whose rows are the steps of a sequence, "
                f"such as (1, steps, features), or the output of a layer with returns='sequence', "
                f"got {shape}"
            )
        outputs = KINDS[self.kind].gates * self.units
        features = shape[0] * shape[2]
        weight = (outputs, shape[0], 1, shape[2])
        learnables = self.learnables(weight, glorot_uniform(features, outputs), outputs)
        recurrent = (outputs, self.units, 1, 1), glorot_uniform(self.units, self.units)
        learnables = {  # in the order of PyTorch's arrays
            "weight": learnables.pop("weight"),
            "recurrent_weight": recurrent,
            **learnables,
        }
        is_last = self.returns == "last"
        return Built((self.units,) if is_last else (self.units, shape[1], 1), learnables)

    def _arrays(self, context: LayerContext) -> tuple[Any, ...]:
        return context["weight"], context["recurrent_weight"], self.bias_of(context)

    def forward(self, x: Value, context: LayerContext) -> Value:
        options = {"returns": self.returns, "reverse": self.reverse, "truncate": self.truncate}
        return getattr(ops, self.kind)(x, *self._arrays(context), **options)[0]

    def multiply_adds(self, shape: Shape, output_shape: Shape) -> int:
        gates = KINDS[self.kind].gates * self.units
        return shape[1] * gates * (shape[0] * shape[2] + self.units)


def _lstm_bias(seed: int, key: str, shape: Shape) -> np.ndarray:
    """Return zeros, and ones for the forget gate, so that a new layer remembers its state."""
    bias = np.zeros(shape, np.float32)
    bias[shape[0] // 4 : shape[0] // 2] = 1
    return bias


@layer_class
class LSTM(_Recurrent):
    """Long short-term memory over the rows of images; see `ops.lstm`.

    The initial bias is 1 for the forget gate, and 0 for the other gates.
    """

    kind: ClassVar[str] = "lstm"

    def learnables(
        self, weight_shape: Shape, initial: Initial, outputs: int
    ) -> dict[str, tuple[Shape, Initial]]:
        arrays = super().learnables(weight_shape, initial, outputs)
        return {**arrays, "bias": ((outputs,), _lstm_bias)} if self.bias else arrays


@layer_class
class GRU(_Recurrent):
    """Gated recurrent unit over the rows of images; see `ops.gru`.

    Parameters
    ----------
    recurrent_bias_learn_rate_factor, recurrent_bias_l2_factor
        Factors by which the optimizer's learning rate and L2 regularization are multiplied for the
        recurrent bias, which a layer with a bias has, too.
    """

    kind: ClassVar[str] = "gru"

    recurrent_bias_learn_rate_factor: float = field(default=1.0, kw_only=True)
    recurrent_bias_l2_factor: float = field(default=0.0, kw_only=True)

    def learnables(
        self, weight_shape: Shape, initial: Initial, outputs: int
    ) -> dict[str, tuple[Shape, Initial]]:
        arrays = super().learnables(weight_shape, initial, outputs)
        return {**arrays, "recurrent_bias": ((outputs,), 0.0)} if self.bias else arrays

    def _arrays(self, context: LayerContext) -> tuple[Any, ...]:
        recurrent_bias = context["recurrent_bias"] if self.bias else None
        return *super()._arrays(context), recurrent_bias
