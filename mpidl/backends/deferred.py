"""Define activations that are computed when a backend reads them, and their gradients.

If a ReLU or a clip to a range follows a batch normalization, only the normalization's input is
stored. Backends compute the activation while they read this input, which saves a pass over memory
(see `mpidl.nn.fusion`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from mpidl.core import fold
from mpidl.core.blocks import Batch, Blocked, DeferredInput
from mpidl.core.values import BF16, as_type


class NormalizedInput(DeferredInput):
    """The operand from which a backend computes (x - mean) * scale + beta without limits."""

    __slots__ = ()

    def __new__(
        cls, x: np.ndarray, mean: np.ndarray, scale: np.ndarray, beta: np.ndarray
    ) -> NormalizedInput:
        return super().__new__(cls, x, mean, scale, beta, -math.inf, math.inf)


class DeferredValue(Blocked):
    """A batch normalization, perhaps with an activation, stored as the input of the normalization.

    The property `raw` computes the value on each access and does not keep it.

    Parameters
    ----------
    deferred
        The stored input, and the mean, scale and beta of the normalization.
    batch
        The mini-batch that the images belong to.
    compute
        The backend's function that computes lanes from `deferred`.
    image_shape
        Shape of one image's entry; by default, as in `deferred.x`.
    """

    __slots__ = ("deferred", "compute", "shape_of_image")

    def __init__(
        self,
        deferred: DeferredInput,
        batch: Batch,
        compute: Callable[[DeferredInput], np.ndarray],
        image_shape: tuple[int, ...] | None = None,
    ) -> None:
        self.deferred, self.batch, self.compute = deferred, batch, compute
        self.shape_of_image = deferred.x.shape[1:-1] if image_shape is None else image_shape

    @property
    def stored_array(self) -> np.ndarray:
        return self.deferred.x

    @property
    def raw(self) -> np.ndarray:
        lanes = self.compute(self.deferred)
        return lanes.reshape(len(lanes), *self.shape_of_image, lanes.shape[-1])

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.shape_of_image

    def stored(self) -> Blocked:
        return self.like(self.raw)


class DeferredActivation(DeferredValue):
    """The ReLU or clip of a batch normalization, stored as the input of the normalization.

    Backends normalize while they read `source`.
    """

    __slots__ = ()

    @property
    def source(self) -> DeferredInput:
        return self.deferred

    def reshape(self, image_shape: tuple[int, ...]) -> DeferredActivation:
        """Return a DeferredActivation with the same values and another image shape."""
        return DeferredActivation(self.deferred, self.batch, self.compute, image_shape)


class DeferredNormalization(DeferredActivation):
    """A batch normalization stored as a `NormalizedInput`.

    Additions, elementwise functions and convolutions normalize while they read it.
    """

    __slots__ = ()


def readable(value: Blocked) -> np.ndarray | DeferredInput:
    """Return the operand for a backend function that needs the value's image shape.

    If the value is a DeferredActivation with the image shape of its stored input, the operand is a
    DeferredInput. Otherwise, the operand is the raw array.
    """
    if isinstance(value, DeferredActivation) and value.image_shape != value.deferred.x.shape[1:-1]:
        return value.raw
    return value.source


def addend(value: Blocked) -> np.ndarray | DeferredInput:
    """Return the operand that an addition reads: a NormalizedInput, or `readable`."""
    return value.deferred if isinstance(value, DeferredNormalization) else readable(value)


def in_one_type(
    values: Sequence[Blocked],
    operand: Callable[[Blocked], np.ndarray | DeferredInput] = readable,
) -> list[np.ndarray | DeferredInput]:
    """Return the operand of each value. If some are bfloat16, the others are rounded to bfloat16.

    Images, results of dense layers and results of custom layers are float32 in every precision.
    """
    rounds = any(value.storage == BF16 for value in values)
    return [
        as_type(value.raw, BF16) if rounds and value.storage != BF16 else operand(value)
        for value in values
    ]


class GradientWithSums(Blocked):
    """The cotangent of a DeferredValue with the sums that its batch normalization needs.

    Parameters
    ----------
    sums
        A Partial of shape (2C,) and type float64: the sums of dz per channel, followed by the sums
        of dz * (x - mean). dz is the cotangent where the normalized value is within the limits of
        the activation, and 0 elsewhere; if there is no activation, it is the cotangent.
    is_shared
        Whether other cotangents use the same memory, so that no op may overwrite it.
    """

    __slots__ = ("sums", "is_shared")

    def __init__(
        self, lanes: np.ndarray, batch: Batch, sums: fold.Partial, is_shared: bool = False
    ) -> None:
        super().__init__(lanes, batch)
        self.sums, self.is_shared = sums, is_shared
