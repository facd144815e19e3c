"""Batch normalization and cross-channel normalization layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

import numpy as np

from mpidl import backends, ops
from mpidl.nn.layers.base import STORED, Built, Layer, LayerContext, Shape, Value, layer_class
from mpidl.ops import check
from mpidl.ops.lrn import check_window

__all__ = ["BatchNorm", "CrossChannelNorm"]


@layer_class
class BatchNorm(Layer):
    """Batch normalization; see `ops.batchnorm`.

    In training, each channel is normalized by the mean and variance of the mini-batch. In
    prediction, each channel is normalized by the running mean and variance.

    Parameters
    ----------
    epsilon
        Constant added to the variance.
    decay
        Weight of a new mini-batch in the running mean and variance, from 0 to 1.
    scale_learn_rate_factor, offset_learn_rate_factor
        Factors by which the optimizer's learning rate is multiplied for gamma (the scale) and beta
        (the offset). A learnable with the factor 0 is not differentiated, but the layer still uses
        the mean and variance of the mini-batch.
    scale_l2_factor, offset_l2_factor
        Factors by which the optimizer's L2 regularization is multiplied for gamma and beta.
    """

    epsilon: float = field(default=1e-5, kw_only=True, metadata=STORED)
    decay: float = field(default=0.1, kw_only=True, metadata=STORED)
    scale_learn_rate_factor: float = field(default=1.0, kw_only=True)
    offset_learn_rate_factor: float = field(default=1.0, kw_only=True)
    scale_l2_factor: float = field(default=0.0, kw_only=True)
    offset_l2_factor: float = field(default=0.0, kw_only=True)

    def factors(self, learnable: str) -> tuple[float, float]:
        return super().factors({"gamma": "scale", "beta": "offset"}[learnable])

    def build(self, shape: Shape) -> Built:
        numbers = check.are_numbers(self.epsilon, self.decay)
        if not (numbers and self.epsilon > 0 and 0 <= self.decay <= 1):
            raise ValueError(
                f"{self.name}: expected epsilon > 0 and a decay from 0 to 1, got {self.epsilon!r} "
                f"and {self.decay!r}"
            )
        c = (shape[0],)
        return Built(
            shape, {"gamma": (c, 1.0), "beta": (c, 0.0)}, {"mean": (c, 0.0), "variance": (c, 1.0)}
        )

    def _keys(self) -> tuple[str, str]:
        return f"{self.name}.mean", f"{self.name}.variance"

    def running(self, context: LayerContext) -> tuple[np.ndarray, np.ndarray]:
        """Return the running mean and variance.

        Parameters
        ----------
        context : LayerContext
            The layer's arrays.

        Returns
        -------
        tuple of array
            (mean, variance), each (C,) float32.
        """
        mean, variance = self._keys()
        return context.state[mean], context.state[variance]

    def recorder(self, context: LayerContext) -> Callable[[np.ndarray, np.ndarray], None]:
        """Return a function that updates the running state with a mini-batch's mean and variance.

        Parameters
        ----------
        context : LayerContext
            The layer's arrays.

        Returns
        -------
        callable
            A function f(mean, variance) of arrays (C,) that stores the new state in
            `context.state`.
        """

        def record(*statistics):
            keys = self._keys()
            olds = [context.state[key] for key in keys]
            news = backends.of_array(olds[0]).running(olds, statistics, self.decay)
            context.state.update(zip(keys, news, strict=True))

        return record

    def forward(self, x: Value, context: LayerContext) -> Value:
        if not context.training:
            return ops.batchnorm_predict(
                x, *self.running(context), context["gamma"], context["beta"], epsilon=self.epsilon
            )
        return ops.batchnorm(
            x,
            context["gamma"],
            context["beta"],
            epsilon=self.epsilon,
            scope=context.batchnorm,
            record=self.recorder(context),
        )


@layer_class
class CrossChannelNorm(Layer):
    """Cross-channel (local response) normalization; see `ops.cross_channel_norm`.

    Parameters
    ----------
    window
        Number of neighbouring channels over which the squares are summed.
    alpha, beta, k
        Constants of the formula in `ops.cross_channel_norm`.
    """

    window: int
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 2.0

    def build(self, shape: Shape) -> Built:
        check_window(self.name, self.window, self.alpha, self.beta, self.k)
        return Built(shape)

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.cross_channel_norm(x, self.window, alpha=self.alpha, beta=self.beta, k=self.k)
