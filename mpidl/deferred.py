"""Deferred activations, which are computed when they are read, and their gradients.

If a ReLU follows a batch normalization, only the normalization's input is stored. Backends compute
the activation while they read this input, which saves a pass over memory (see `mpidl.nn.fusion`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpidl import fold
from mpidl.blocks import Batch, Blocked


class DeferredInput(NamedTuple):
    """The stored input of an activation max(0, (x - mean) * scale + beta), computed per channel.

    Attributes
    ----------
    x
        Input of the normalization, (blocks, C, ..., 16).
    mean, scale, beta
        One number per channel, (C,), in the dtype of x.
    """

    x: np.ndarray
    mean: np.ndarray
    scale: np.ndarray
    beta: np.ndarray


class DeferredActivation(Blocked):
    """The result of batch normalization and ReLU, which stores the input instead of the result.

    Backends compute the result while they read `source`. The property `lanes` computes the result
    again on each access.

    Parameters
    ----------
    source
        The stored input, and the mean, scale and beta of the normalization.
    batch
        The mini-batch that the images belong to.
    compute
        The backend's function that computes the lanes of the result from a DeferredInput.
    image_shape
        Shape of the entry of one image; by default, as in `source.x`.
    """

    __slots__ = ("deferred", "compute", "shape_of_image")

    def __init__(
        self,
        source: DeferredInput,
        batch: Batch,
        compute: Callable[[DeferredInput], np.ndarray],
        image_shape: tuple[int, ...] | None = None,
    ) -> None:
        self.deferred, self.batch, self.compute = source, batch, compute
        self.shape_of_image = source.x.shape[1:-1] if image_shape is None else image_shape

    @property
    def source(self) -> DeferredInput:
        return self.deferred

    @property
    def lanes(self) -> np.ndarray:
        lanes = self.compute(self.deferred)
        return lanes.reshape(len(lanes), *self.shape_of_image, lanes.shape[-1])

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.shape_of_image

    @property
    def dtype(self) -> np.dtype:
        return self.deferred.x.dtype

    def stored(self) -> Blocked:
        return self.like(self.lanes)

    def reshape(self, image_shape: tuple[int, ...]) -> DeferredActivation:
        """Return a DeferredActivation with the same values and another image shape."""
        return DeferredActivation(self.deferred, self.batch, self.compute, image_shape)


def readable(value: Blocked) -> np.ndarray | DeferredInput:
    """Return the operand for a backend function that needs the value's image shape.

    The operand is a DeferredInput for a DeferredActivation that has the image shape of its input.
    In all other cases, the operand is the array of lanes.
    """
    if isinstance(value, DeferredActivation) and value.image_shape != value.deferred.x.shape[1:-1]:
        return value.lanes
    return value.source


class GradientWithSums(Blocked):
    """The cotangent of a DeferredActivation, with the sums for its batch normalization's gradient.

    Parameters
    ----------
    sums
        A Partial (2C,) in float64: for each channel the sum of dz, followed by the sums of
        dz * (x - mean). dz is the cotangent where the activation is > 0, and 0 elsewhere.
    """

    __slots__ = ("sums",)

    def __init__(self, lanes: np.ndarray, batch: Batch, sums: fold.Partial) -> None:
        super().__init__(lanes, batch)
        self.sums = sums
