"""Normalize pixels, with statistics computed in one pass over the training set.

The normalizations have the same names as in MATLAB's image input layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpidl.core import fold
from mpidl.core.blocks import LANES, OneRank, blocks_of
from mpidl.data.checks import advising, read_images
from mpidl.data.datastore import Datastore
from mpidl.data.transforms.options import NORMALIZATIONS, NUMBERS, NUMBERS_NAME
from mpidl.data.transforms.sizes import centred
from mpidl.errors import UserError
from mpidl.files import call_together

USUAL, UNKNOWN = "rescale-zero-one", "unknown"
DESCRIBED = "as the file says"
NAMES = NORMALIZATIONS
FIXED = NAMES[:5]
IMAGENET = "0.485,0.456,0.406/0.229,0.224,0.225"  # of R, G and B
CAFFE = (123.68, 116.779, 103.939)  # means of R, G and B, for pixels from 0 to 255
# What a user chooses from if a file does not describe the images of its network.
CHOICES = (
    "none (pixels from 0 to 255), rescale-zero-one (from 0 to 1, as torchvision's ToTensor), "
    "rescale-symmetric (from -1 to 1), imagenet (mean and deviation of ImageNet's images), caffe "
    "(BGR minus ImageNet's mean) or MEAN/STD of pixels from 0 to 1, such as 0.1307/0.3081"
)
CHUNK = 16 << 20  # bytes of images that `statistics` reads at a time
FLAT = 1e-12  # a channel counts as constant if variance / mean**2 does not exceed this value


@dataclass(frozen=True, eq=False)
class Normalization:
    """The float32 map (pixel - centre) / divisor that a network applies to every image.

    Attributes
    ----------
    name : str
        Name of the normalization, one of NAMES, or MEAN/STD. "unknown" is that of a network whose
        file does not describe it; every use raises UserError.
    centre, divisor : np.ndarray or None
        float32 arrays of equal shape: (C,) with one value per channel, or (C, H, W) with one value
        per pixel. Both are None for "rescale-zero-one", which divides uint8 pixels by 255 and
        leaves floats unchanged.
    reason : str
        Why a network of a file has this normalization, for messages.
    """

    name: str = USUAL
    centre: np.ndarray | None = None
    divisor: np.ndarray | None = None
    reason: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the normalization can be used."""
        return self.name != UNKNOWN

    def need_known(self) -> None:
        """Raise the UserError that lists the choices if the normalization is not known."""
        if not self.is_known:
            raise UserError(
                f"{self.reason}; choose it with --normalization, in Python with "
                f"dl.load_onnx(path, normalization=...) or dl.load_weights: {CHOICES}; to train, "
                "TrainingOptions(normalization=...) chooses it, or net.normalization = None "
                f"for the default {USUAL}"
            )

    def describe(self) -> str:
        """Return the name, the numbers per channel and the reason.

        Returns
        -------
        str
            One line.
        """
        numbers = ""
        if self.centre is not None and self.divisor is not None and self.centre.ndim == 1:
            if self.name == "none" and not self.centre.any() and (self.divisor == 1).all():
                numbers = " (pixels from 0 to 255)"
            else:
                rows = (self.centre, self.divisor)
                texts = (", ".join(f"{number:g}" for number in row) for row in rows)
                numbers = " (minus {}, divided by {})".format(*texts)
        return f"{self.name}{numbers}" + (f", {self.reason}" if self.reason else "")

    def arrays(self) -> dict[str, np.ndarray]:
        """Return {"centre": ..., "divisor": ...} for storage, or {} if both are None.

        Returns
        -------
        dict
            {name: array}
        """
        if self.centre is None or self.divisor is None:
            return {}
        return {"centre": self.centre, "divisor": self.divisor}

    def window(self, size: Sequence[int]) -> Normalization:
        """Return the normalization for windows of `size` (P, Q) cut from the image centre.

        Parameters
        ----------
        size : tuple of int
            (P, Q), at most the size of the statistics.

        Returns
        -------
        Normalization
            The normalization of the windows. If the statistics are per channel, this object itself.
        """
        self.need_known()
        centre, divisor = self.centre, self.divisor
        if centre is None or divisor is None or centre.shape[1:] in ((), tuple(size)):
            return self
        top, left = centred(centre.shape, size)
        cut = np.s_[:, top : top + size[0], left : left + size[1]]
        return replace(self, centre=centre[cut].copy(), divisor=divisor[cut].copy())

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Normalize uint8 or float images (n, C, H, W), and return them as float32."""
        images = np.asarray(images)
        self.need_known()
        self._check_dtype(images.dtype)
        is_uint8, images = images.dtype == np.uint8, images.astype(np.float32)
        if self.centre is None:
            return images / np.float32(255) if is_uint8 else images
        centre, divisor = (v if v.ndim == 3 else v[:, None, None] for v in self.arrays().values())
        return (images - centre) / divisor

    def _check_dtype(self, dtype):
        if dtype != np.uint8 and (self.name == "imagenet" or is_numbers(self.name)):
            raise UserError(
                f"normalization {self.name}: expected 8-bit images, found {dtype}; normalize them "
                "in advance, and choose none"
            )

    def check(self, shape: Sequence[int], dtype: Any = np.uint8) -> None:
        """Raise UserError if the numbers do not fit images of `shape` (C, H, W).

        Parameters
        ----------
        shape : tuple of int
            Shape (C, H, W) of the images.
        dtype : dtype
            Type of the images. "imagenet" and MEAN/STD are for 8-bit pixels.
        """
        self.need_known()
        self._check_dtype(np.dtype(dtype))
        if self.centre is not None and self.centre.shape not in (tuple(shape), tuple(shape[:1])):
            raise UserError(
                f"normalization {self.name}: expected statistics for images of shape "
                f"{tuple(shape)}, got shape {self.centre.shape}"
            )


def unknown(reason: str) -> Normalization:
    """Return the normalization of a network whose file does not describe it."""
    return Normalization(UNKNOWN, reason=reason)


def read(name: str, arrays: dict[str, np.ndarray], channels: int) -> Normalization:
    """Restore a Normalization from its name and the arrays read from a file.

    Raises ValueError if the name is unknown, or the arrays are missing or invalid. `arrays` is the
    result of `Normalization.arrays`.
    """
    if name == UNKNOWN:
        return unknown("the file does not say how to normalize the images")
    if name not in NAMES and not is_numbers(name):
        raise ValueError(f"unknown normalization {name!r}")
    if not arrays:
        if name not in (USUAL, "none"):
            raise ValueError(f"normalization {name}: the statistics are missing")
        usual = Normalization() if name == USUAL else no_normalization(channels)
        return replace(usual, reason=DESCRIBED)
    centre, divisor = (np.asarray(arrays[key], np.float32) for key in ("centre", "divisor"))
    if centre.shape != divisor.shape or not (divisor != 0).all():
        raise ValueError(f"normalization {name}: the statistics are invalid")
    return Normalization(name, centre, divisor, DESCRIBED)


def is_numbers(name: object) -> bool:
    """Return whether a name consists of numbers: MEAN/STD of pixels from 0 to 1."""
    return isinstance(name, str) and re.fullmatch(NUMBERS, name) is not None


def fixed(name: str, channels: int) -> Normalization:
    """Return a normalization that does not depend on a training set: "none", "rescale-zero-one",
    "rescale-symmetric" (for 8-bit pixels), "imagenet", "caffe", or MEAN/STD of pixels from 0 to 1,
    such as "0.1307/0.3081" or "0.485,0.456,0.406/0.229,0.224,0.225". Raises UserError if the name
    is unknown or depends on a training set, or if the numbers are invalid.
    """
    if name == USUAL:
        return Normalization()
    if name == "none":
        return no_normalization(channels)
    if name == "rescale-symmetric":
        half = np.full(channels, 127.5, np.float32)
        return Normalization(name, half, half)
    rows: list[tuple[float, ...]]
    if name == "caffe":
        rows = [CAFFE, (1.0,)]
    elif name == "imagenet" or is_numbers(name):
        text = IMAGENET if name == "imagenet" else name
        rows = [tuple(255 * float(n) for n in row.split(",")) for row in text.split("/")]
    else:
        raise UserError(f"normalization: expected {CHOICES}, found {name}")
    rows = [row * channels if len(row) == 1 else row for row in rows]
    for row in rows:
        if len(row) != channels:
            raise UserError(
                f"normalization {name}: expected images of {len(row)} channels, found {channels}"
            )
    if not all(rows[1]):
        raise UserError(f"normalization {name}: expected deviations above 0, found 0")
    centre, divisor = (np.array(row, np.float32) for row in rows)
    return Normalization(name, centre, divisor)


def normalization(name: str, datastore: Datastore, world: Any = None) -> Normalization:
    """Make a normalization for a training set.

    The call is collective if the normalization needs statistics.

    Parameters
    ----------
    name : str
        Name of the normalization:

        - "none": leave pixels unchanged.
        - "rescale-zero-one": divide uint8 pixels by 255; leave floats unchanged.
        - "rescale-symmetric": map uint8 pixels to pixel / 127.5 - 1. Map floats linearly so that
          the smallest and largest value of each channel become -1 and 1.
        - "imagenet": subtract the mean of ImageNet's images and divide by their standard deviation,
          for 8-bit RGB images.
        - "caffe": subtract the mean of ImageNet's images from 8-bit RGB images.
        - MEAN/STD, such as "0.1307/0.3081": divide 8-bit pixels by 255, subtract the mean and
          divide by the standard deviation, with one number or one per channel.
        - "zerocenter": subtract each channel's mean.
        - "zerocenter-element": subtract the mean image.
        - "zscore": subtract each channel's mean and divide by its standard deviation over all
          pixels.
    datastore : Datastore
        The training set.
    world : World, optional
        The ranks among which the pass over the set is divided. By default, this rank reads all
        images.

    Returns
    -------
    Normalization
        A callable that maps images (n, C, H, W) to float32.

    Raises
    ------
    UserError
        If the name is unknown, or statistics are needed and the set is empty.
    """
    if name not in NAMES and not is_numbers(name):
        raise UserError(
            f"normalization must be one of {', '.join(NAMES)}, or {NUMBERS_NAME}, got {name}"
        )
    if not needs_statistics(name, datastore):
        return fixed(name, datastore.image_shape[0])
    if not len(datastore):
        raise UserError(f"normalization {name}: expected images, found none")
    stats = statistics(datastore, world)
    centre, divisor = stats.mean, np.ones(len(stats.mean))
    if name == "rescale-symmetric":
        low, high = (v.astype(np.float64) for v in (stats.low, stats.high))
        centre = (low + high) / 2
        divisor = np.where(low == high, 1, (high - low) / 2)  # a constant channel becomes 0
    elif name == "zerocenter-element":
        centre, divisor = stats.mean_image, np.ones_like(stats.mean_image)
    elif name == "zscore":
        is_flat = stats.variance <= FLAT * (stats.mean**2)
        divisor = np.sqrt(np.where(is_flat, 1, stats.variance))
    return Normalization(name, centre.astype(np.float32), divisor.astype(np.float32))


def needs_statistics(name: str, datastore: Datastore) -> bool:
    """Return whether a normalization requires a pass over the images of a set."""
    is_symmetric = name == "rescale-symmetric" and datastore.dtype != np.uint8
    return is_symmetric or name in ("zerocenter", "zerocenter-element", "zscore")


def no_normalization(channels: int) -> Normalization:
    """Return the Normalization "none", which leaves images of `channels` channels unchanged."""
    ones = np.ones(channels, np.float32)
    return Normalization("none", 0 * ones, ones)


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of the images of a set."""

    count: int
    mean_image: np.ndarray  # mean of each pixel over all images, float64 (C, H, W)
    mean: np.ndarray  # mean and variance of each channel over all images and pixels, float64 (C,)
    variance: np.ndarray
    low: np.ndarray  # smallest and largest value of each channel, (C,)
    high: np.ndarray


def statistics(datastore: Datastore, world: Any = None) -> Statistics:
    """Compute the statistics of all images of a set. Collective.

    Each image is read once, by one rank. The result does not depend on the number of ranks: sums of
    uint8 pixels are exact integers, and `mpidl.core.fold` adds floats in blocks of 16 images.

    Parameters
    ----------
    datastore : Datastore
        The images.
    world : World, optional
        The ranks among which the images are divided. By default, this rank reads all images.

    Returns
    -------
    Statistics
        Count, mean, variance and range of the pixels.

    Raises
    ------
    UserError
        If reading fails on any rank. All ranks raise the error.
    """
    n, shape, world = len(datastore), datastore.image_shape, OneRank() if world is None else world
    leaves = blocks_of(n)
    tree = fold.Tree(leaves, fold.split_blocks(leaves, world.size), world.rank)
    local, run = _LocalSums(tree, datastore), [min(edge * LANES, n) for edge in tree.run]
    if world.size == 1:
        local.read(datastore, *run)
        low, high, sums, squares = local.low, local.high, local.sums, local.squares
    else:
        call_together(world, lambda: local.read(datastore, *run))
        low, high = world.gop("min", local.low), world.gop("max", local.high)
        sums, squares = world.gop("sum", local.sums), world.gop("sum", local.squares)
    if datastore.dtype == np.uint8:
        mean_image = sums / n
        total, pixels = sums.sum(axis=(1, 2)), n * shape[1] * shape[2]
        mean = total / pixels
        # Python integers do not overflow, so only the division rounds.
        variance = np.array(
            [
                (pixels * int(s) - int(t) ** 2) / pixels**2
                for s, t in zip(squares, total, strict=True)
            ]
        )
    else:
        width = int(np.prod(shape))
        packed = world.gplus(local.counter.partial((1 + 2 * width,), np.float64))
        mean_image = packed[1 : 1 + width].reshape(shape)
        spread = packed[1 + width :].reshape(shape)
        mean = mean_image.mean(axis=(1, 2))
        within = spread.mean(axis=(1, 2)) / n
        variance = within + ((mean_image - mean[:, None, None]) ** 2).mean(axis=(1, 2))
    return Statistics(n, mean_image, mean, variance, low, high)


class _LocalSums:
    """Statistics of one rank's images: integer sums for uint8, folded moments for floats."""

    def __init__(self, tree, datastore):
        channels = datastore.image_shape[0]
        self.low = np.full(channels, np.inf)
        self.high = -self.low
        self.sums = np.zeros(datastore.image_shape, np.int64)
        self.squares = np.zeros(channels, np.int64)
        self.counter = fold.Counter(tree, fold.merge_moments)

    def read(self, datastore, first, stop):
        """Read images `first` to ``stop - 1`` and update the statistics."""
        size = int(np.prod(datastore.image_shape)) * datastore.dtype.itemsize
        step = max(1, CHUNK // max(1, size * LANES)) * LANES
        for start in range(first, stop, step):
            with advising():
                images = read_images(datastore, np.arange(start, min(start + step, stop)))
            self.low = np.minimum(self.low, images.min(axis=(0, 2, 3)))
            self.high = np.maximum(self.high, images.max(axis=(0, 2, 3)))
            if images.dtype == np.uint8:
                self.sums += images.sum(axis=0, dtype=np.int64)
                for c in range(len(self.squares)):  # sum squares by a histogram of the pixels
                    histogram = np.bincount(images[:, c].ravel(), minlength=256)
                    self.squares[c] += int(histogram @ np.arange(256, dtype=np.int64) ** 2)
            else:
                for b in range(0, len(images), LANES):
                    self.counter.push(_moments(images[b : b + LANES].astype(np.float64)))


def _moments(block):
    """Return [count, mean, M2] of each pixel over a block (n <= 16, C, H, W), float64.

    M2 is the sum of squared deviations from the mean.
    """
    flat = block.reshape(len(block), -1)
    mean = flat.sum(axis=0) / len(flat)
    return np.concatenate([[float(len(flat))], mean, ((flat - mean) ** 2).sum(axis=0)])
