"""Layers of normalization within an image: layer, group and instance normalization."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mpidl import ops
from mpidl.nn.layers.base import STORED, Built, Layer, LayerContext, Shape, Value, layer_class
from mpidl.ops.group_norm import check_epsilon, check_groups, check_over

__all__ = ["GroupNorm", "InstanceNorm", "LayerNorm"]


@dataclass
class _WithinImages(Layer):
    """Base class of layers that normalize within an image, with a scale gamma and an offset beta.

    Parameters
    ----------
    epsilon
        Constant added to the variance.
    affine
        Whether the layer has a learnable scale, gamma, and a learnable offset, beta.
    scale_learn_rate_factor, offset_learn_rate_factor
        Factors by which the optimizer's learning rate is multiplied for gamma and beta. A learnable
        with the factor 0 is not differentiated.
    scale_l2_factor, offset_l2_factor
        Factors by which the optimizer's L2 regularization is multiplied for gamma and beta.
    """

    epsilon: float = field(default=1e-5, kw_only=True, metadata=STORED)
    affine: bool = field(default=True, kw_only=True)
    scale_learn_rate_factor: float = field(default=1.0, kw_only=True)
    offset_learn_rate_factor: float = field(default=1.0, kw_only=True)
    scale_l2_factor: float = field(default=0.0, kw_only=True)
    offset_l2_factor: float = field(default=0.0, kw_only=True)

    def factors(self, learnable: str) -> tuple[float, float]:
        return super().factors({"gamma": "scale", "beta": "offset"}[learnable])

    def _built(self, shape: Shape, factors: Shape) -> Built:
        """Return what the layer needs if gamma and beta have the shape `factors`."""
        check_epsilon(self.name, self.epsilon)
        if len(shape) not in (1, 3):
            raise ValueError(
                f"{self.name}: expected images (C, H, W) or features (C,), got {shape}"
            )
        return Built(
            shape, {"gamma": (factors, 1.0), "beta": (factors, 0.0)} if self.affine else {}
        )

    def _arrays(self, context: LayerContext) -> tuple[np.ndarray | None, np.ndarray | None]:
        return (context["gamma"], context["beta"]) if self.affine else (None, None)


@layer_class
class LayerNorm(_WithinImages):
    """Layer normalization; see `ops.layer_norm`.

    Parameters
    ----------
    over
        With "channels", each pixel is normalized over its channels, and gamma and beta have one
        element per channel. With "image", each image is normalized over all its numbers, and gamma
        and beta have the shape of an image, as in PyTorch's LayerNorm([C, H, W]).
    """

    over: Literal["channels", "image"] = "channels"

    def build(self, shape: Shape) -> Built:
        check_over(self.name, self.over)
        return self._built(shape, shape if self.over == "image" else shape[:1])

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.layer_norm(x, *self._arrays(context), over=self.over, epsilon=self.epsilon)


@layer_class
class GroupNorm(_WithinImages):
    """Group normalization; see `ops.group_norm`.

    Parameters
    ----------
    groups
        Number of groups of adjacent channels, a divisor of the number of channels.
    """

    groups: int

    def build(self, shape: Shape) -> Built:
        check_groups(self.name, self.groups, shape)
        return self._built(shape, shape[:1])

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.group_norm(x, *self._arrays(context), groups=self.groups, epsilon=self.epsilon)


@layer_class
class InstanceNorm(_WithinImages):
    """Instance normalization of each channel of an image; see `ops.instance_norm`.

    By default, the layer has a learnable scale and offset, like all normalization layers of mpidl.
    PyTorch's InstanceNorm2d has them only with affine=True.
    """

    def build(self, shape: Shape) -> Built:
        check_groups(self.name, shape[0], shape)
        return self._built(shape, shape[:1])

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.instance_norm(x, *self._arrays(context), epsilon=self.epsilon)
