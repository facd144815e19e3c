"""Draw random numbers from keys, with arithmetic that gives the same bits on all processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidl import backends

DEGREE = 0.017453292519943295
_BITS = 40  # number of fractional binary digits of an exponent that `power` uses
_TERMS = 11  # terms of the sine and cosine series; up to 45 degrees, more terms change no bit


class SampleKeys(NamedTuple):
    """Keys of the random numbers of some images.

    A function of a queue that uses random numbers must derive them from these keys (see
    `mpidl.keyed`).

    Attributes
    ----------
    indices : np.ndarray
        Sample numbers, (n,): indices in the datastore, unless balanced sampling repeats images (see
        `mpidl.data.balanced`).
    epoch, seed : int
        Epoch and seed of the mini-batch.
    """

    indices: np.ndarray
    epoch: int
    seed: int

    def words(self, purpose: str, count: int) -> np.ndarray:
        """Return `count` random words for each image, uint64 (n, count)."""
        backend = backends.of_type(np.float32)
        return backend.keyed_words(self.seed, purpose, count, self.epoch, self.indices)


def uniforms(keys: SampleKeys, purpose: str, count: int) -> np.ndarray:
    """Return `count` numbers in [0, 1) for each image, float64 (count, n)."""
    return ((keys.words(purpose, count) >> np.uint64(11)) * 2.0**-53).T


def power(base: np.ndarray | float, exponent: np.ndarray | float) -> np.ndarray:
    """Return base**exponent for bases >= 0 and exponents >= 0.

    The result is a product of repeated squares and square roots of the base, so its bits do not
    depend on the C library. The exponent is rounded down to a multiple of 2**-40.
    """
    base, exponent = np.broadcast_arrays(np.float64(base), np.float64(exponent))
    integer = np.floor(exponent)
    result, square, root = np.ones(base.shape), base.copy(), base.copy()
    rest = exponent - integer
    while integer.any():
        result = np.where(integer % 2 == 1, result * square, result)
        square, integer = square * square, np.floor(integer / 2)
    for _ in range(_BITS):
        root, rest = np.sqrt(root), rest * 2
        result = np.where(rest >= 1, result * root, result)
        rest = rest - np.floor(rest)
    return result


def between(low: float, high: float, u: np.ndarray) -> np.ndarray:
    """Map numbers u in [0, 1) linearly to [low, high)."""
    return low + (high - low) * u


def log_between(low: float, high: float, u: np.ndarray) -> np.ndarray:
    """Map numbers u in [0, 1) to [low, high) so that uniform u gives uniform logarithms."""
    return low * power(high / low, u)


def boxes(
    u: np.ndarray,
    shape: Sequence[int],
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw rectangles of random area, aspect ratio and position inside images of height and width
    `shape`. The area is uniform in a range of fractions of the image's area, and the logarithm of
    the aspect ratio (width / height) is uniform. Each image has several attempts, each with four of
    the uniform numbers `u` (4 * attempts, n): area, aspect, top and left. The first rectangle that
    fits into the image is used, as in torchvision. Returns top, left, height and width, int64 (n,),
    and whether an attempt fitted; if not, they are 0.
    """
    rows, columns = shape
    n = u.shape[1]
    top, left, height, width = (np.zeros(n, np.int64) for _ in range(4))
    fits = np.zeros(n, bool)
    for attempt in u.reshape(-1, 4, n):
        pixels = between(*area, attempt[0]) * (rows * columns)
        ratio = log_between(*aspect, attempt[1])
        h = np.floor(np.sqrt(pixels / ratio) + 0.5).astype(np.int64)
        w = np.floor(np.sqrt(pixels * ratio) + 0.5).astype(np.int64)
        take = ~fits & (h >= 1) & (w >= 1) & (h <= rows) & (w <= columns)
        height[take], width[take] = h[take], w[take]
        top[take] = np.floor((rows - h + 1) * attempt[2]).astype(np.int64)[take]
        left[take] = np.floor((columns - w + 1) * attempt[3]).astype(np.int64)[take]
        fits |= take
        if fits.all():
            break
    return top, left, height, width, fits


def sine_cosine(degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sine and cosine of angles in degrees.

    The angles are reduced by multiples of 90 degrees before Taylor series are summed.
    """
    quarters = np.rint(degrees / 90.0)
    x = (degrees - 90.0 * quarters) * DEGREE  # at most 45 degrees
    square, sine, cosine = x * x, np.ones_like(x), np.ones_like(x)
    for k in range(_TERMS, 0, -1):
        sine = 1.0 - square * sine / (2 * k * (2 * k + 1))
        cosine = 1.0 - square * cosine / ((2 * k - 1) * 2 * k)
    sine = sine * x
    turn = quarters.astype(np.int64) % 4
    return (
        np.choose(turn, [sine, cosine, -sine, -cosine]),
        np.choose(turn, [cosine, -sine, -cosine, sine]),
    )


def tangent(degrees: np.ndarray) -> np.ndarray:
    """Return the tangent of angles in degrees."""
    sine, cosine = sine_cosine(degrees)
    return sine / cosine
