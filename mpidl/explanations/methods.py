"""The methods that explain a class score.

A method is called with a network in prediction mode, a mini-batch and the class of each of this
rank's images. It computes the entry of each image from this image alone.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from mpidl.core.blocks import Blocked
from mpidl.core.tape import Var, value_of
from mpidl.errors import UserError
from mpidl.explanations import watched
from mpidl.explanations.class_scores import (
    entries_of,
    gradient,
    local_value,
    scores_of,
    table_of_scores,
)
from mpidl.nn import Network
from mpidl.ops import check
from mpidl.text import did_you_mean

MethodName: TypeAlias = Literal["grad-cam", "occlusion", "gradient", "integrated-gradients"]
Baseline: TypeAlias = float | Sequence[float] | np.ndarray
MOST_STEPS = 1000  # the quadrature solves an eigenproblem of a matrix steps x steps


class Method(abc.ABC):
    """Base class of the methods."""

    name: ClassVar[MethodName]
    of_channels: ClassVar[bool] = False  # whether each channel of a pixel has an entry
    is_signed: ClassVar[bool] = True  # whether an entry may be negative

    def prepared(self, net: Network) -> Network:
        """Return the network with which the method is called; raise UserError if it does not fit.

        The default is the network itself.
        """
        return net

    def entry_shape(self, net: Network) -> tuple[int, ...]:
        """Return the shape of the entry of an image: (H, W), or (C, H, W)."""
        return net.input_shape if self.of_channels else net.input_shape[1:]

    @abc.abstractmethod
    def __call__(self, net: Network, images: Blocked, classes: np.ndarray) -> np.ndarray:
        """Return the entries of this rank's images, float32 (n, H, W) or (n, C, H, W)."""


@dataclass
class GradCAM(Method):
    """Weight the channels of a layer by the mean gradient of the score, and keep positive sums.

    Selvaraju et al., "Grad-CAM: Visual explanations from deep networks via gradient-based
    localization", 2017. Maps are resized to the image by bilinear interpolation.
    """

    name = "grad-cam"
    is_signed = False
    layer: str | None = None

    def prepared(self, net: Network) -> Network:
        self.layer = watched.chosen_layer(net, self.layer)
        return watched.watch(net, self.layer)

    def __call__(self, net: Network, images: Blocked, classes: np.ndarray) -> np.ndarray:
        scores = scores_of(net, images)
        layer: Any = net[watched.WATCH]
        values = layer.leaf.value.local()
        gradients = gradient(net, scores, layer.leaf, classes)
        maps = np.zeros((len(values), *net.input_shape[1:]), np.float32)
        for i, (value, slope) in enumerate(zip(values, gradients, strict=True)):
            weights = slope.mean(axis=(1, 2), keepdims=True, dtype=np.float64)
            with np.errstate(invalid="ignore"):  # of a network with infinite values
                map_ = np.maximum((weights * value).sum(axis=0), 0)
            maps[i] = resized(map_, maps.shape[1:])
        return maps


@dataclass
class Occlusion(Method):
    """Slide a window over the image, fill it with the baseline, and record the loss of score.

    Zeiler and Fergus, "Visualizing and understanding convolutional networks", 2014. A pixel's entry
    is the mean over the windows that cover it.
    """

    name = "occlusion"
    window: int | tuple[int, int] | None = None
    stride: int | tuple[int, int] | None = None
    baseline: Baseline = 0.0

    def prepared(self, net: Network) -> Network:
        size = net.input_shape[1:]
        window = tuple(max(1, n // 8) for n in size) if self.window is None else self.window
        self.window = window = _pair("window", window, size)
        stride = tuple(-(-n // 2) for n in window) if self.stride is None else self.stride
        self.stride = _pair("stride", stride, window)
        pixels_of(self.baseline, net)
        return net

    def windows(self, size: Sequence[int]) -> list[tuple[slice, slice]]:
        """Return the rows and columns of each window; the last ones may be smaller."""
        axes = [
            [slice(first, first + length) for first in range(0, n - length + step, step)]
            for n, length, step in zip(
                size, check.as_pair(self.window), check.as_pair(self.stride), strict=True
            )
        ]
        return list(itertools.product(*axes))

    def __call__(self, net: Network, images: Blocked, classes: np.ndarray) -> np.ndarray:
        def score(value):
            return entries_of(table_of_scores(net, value_of(scores_of(net, value))), classes)

        pixels, baseline = images.local(), pixels_of(self.baseline, net)
        size, before = pixels.shape[2:], score(images)
        totals, counts = np.zeros((len(pixels), *size)), np.zeros(size)
        for rows, columns in self.windows(size):
            occluded = pixels.copy()
            occluded[:, :, rows, columns] = baseline[:, rows, columns]
            falls = before - score(local_value(occluded, images))
            totals[:, rows, columns] += falls[:, None, None]
            counts[rows, columns] += 1
        return (totals / counts).astype(np.float32)


@dataclass
class Gradient(Method):
    """Multiply each pixel by the gradient of the score with respect to it."""

    name = "gradient"
    of_channels = True

    def __call__(self, net: Network, images: Blocked, classes: np.ndarray) -> np.ndarray:
        return images.local() * image_gradient(net, images, classes)


@dataclass
class IntegratedGradients(Method):
    """Average the gradient on the line from the baseline to the image, times the difference.

    Sundararajan et al., "Axiomatic attribution for deep networks", 2017. The entries of an image
    add up to the difference of the scores of image and baseline, up to the error of the
    Gauss-Legendre quadrature.
    """

    name = "integrated-gradients"
    of_channels = True
    steps: int = 50
    baseline: Baseline = 0.0

    def prepared(self, net: Network) -> Network:
        is_whole = isinstance(self.steps, int | np.integer) and not isinstance(self.steps, bool)
        if not is_whole or not 1 <= self.steps <= MOST_STEPS:
            raise UserError(
                f"steps: expected a whole number from 1 to {MOST_STEPS}, got {self.steps!r}"
            )
        pixels_of(self.baseline, net)
        return net

    def __call__(self, net: Network, images: Blocked, classes: np.ndarray) -> np.ndarray:
        pixels, baseline = images.local(), pixels_of(self.baseline, net)
        difference, total = pixels - baseline, np.zeros(pixels.shape)
        for node, weight in zip(*np.polynomial.legendre.leggauss(self.steps), strict=True):
            point = baseline + np.float32((1 + node) / 2) * difference
            total += weight / 2 * image_gradient(net, local_value(point, images), classes)
        return (difference * total).astype(np.float32)


METHODS: dict[str, type[Method]] = {
    kind.name: kind for kind in (GradCAM, Occlusion, Gradient, IntegratedGradients)
}


def method_of(name: str, options: dict[str, Any]) -> Method:
    """Return a method with its options; those that are None have their defaults.

    Raises UserError if the method is unknown or does not have an option.
    """
    if name not in METHODS:
        hint = did_you_mean(name, METHODS)
        raise UserError(f"method must be {', '.join(METHODS)}, got {name}{hint}")
    kind = METHODS[name]
    for option, value in options.items():
        if value is not None and option not in kind.__annotations__:
            users = [user for user, k in METHODS.items() if option in k.__annotations__]
            raise UserError(f"{option}: expected the method {' or '.join(users)}, found {name}")
    return kind(**{option: value for option, value in options.items() if value is not None})


def image_gradient(net: Network, images: Blocked, classes: np.ndarray) -> np.ndarray:
    """Return the gradient of the score of each image's class with respect to its pixels."""
    leaf = Var(images)
    return gradient(net, scores_of(net, leaf), leaf, classes)


def pixels_of(baseline: Baseline, net: Network) -> np.ndarray:
    """Return the baseline as an image (C, H, W); raise UserError if it is none."""
    valid = f"a number, one per channel, or an image of shape {net.input_shape}"
    try:
        with np.errstate(over="ignore"):
            values = np.asarray(baseline, np.float32)
    except (TypeError, ValueError):
        raise UserError(f"baseline: expected {valid}, got {baseline!r:.40}") from None
    if not np.isfinite(values).all():
        raise UserError(f"baseline: expected finite pixels, got {np.asarray(baseline)!s:.40}")
    values = values[:, None, None] if values.ndim == 1 else values
    try:
        return np.broadcast_to(values, net.input_shape)
    except ValueError:
        raise UserError(f"baseline: expected {valid}, got shape {np.shape(baseline)}") from None


def resized(values: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Resize a map to (H, W) by bilinear interpolation, in float32."""
    from PIL import Image

    picture = Image.fromarray(values.astype(np.float32))
    return np.asarray(picture.resize((size[1], size[0]), Image.Resampling.BILINEAR))


def _pair(option, value, limits):
    """Return an option as (down, across), from 1 to the limits."""
    both = check.as_pair(value)
    integers = [isinstance(n, int | np.integer) and not isinstance(n, bool) for n in both]
    if (
        len(both) != 2
        or not all(integers)
        or not all(1 <= n <= limit for n, limit in zip(both, limits, strict=True))
    ):
        largest = "x".join(map(str, limits))
        raise UserError(
            f"{option}: expected one or two whole numbers from 1 to {largest}, got {value!r}"
        )
    return tuple(map(int, both))
