"""Normalization: what is subtracted from pixels, and what they are divided by.

By the names of MATLAB's image input layer; the statistics come from one exact pass over the
training set.
"""

from dataclasses import dataclass

import numpy as np

from mpidl import fold
from mpidl.blocks import LANES, OneRank, blocks_of
from mpidl.data.datastore import read_images
from mpidl.errors import UserError

USUAL = "rescale-zero-one"
# of floats these two need no statistics either
NAMES = ("none", USUAL, "rescale-symmetric", "zerocenter", "zerocenter-element", "zscore")
CHUNK = 16 << 20  # bytes of images that are read at a time
FLAT = 1e-12  # of its mean square: a channel with less variance has none


@dataclass(frozen=True, eq=False)
class Normalization:
    """value = (pixel - centre) / divisor, in float32, of every image that a network sees.

    name: of NAMES. centre, divisor: float32, both (C,) for each channel, or (C, H, W) for each
    pixel; None where uint8 pixels are divided by 255 and floats are left as they are, which is
    "rescale-zero-one". size: how many images the statistics are of.
    """

    name: str = USUAL
    centre: np.ndarray | None = None
    divisor: np.ndarray | None = None

    def arrays(self):
        """{"centre": ..., "divisor": ...}, or {} where there are none: what a file keeps."""
        if self.centre is None:
            return {}
        return {"centre": self.centre, "divisor": self.divisor}

    def window(self, size):
        """This, of windows `size` (P, Q) in the centre of the images it was made for."""
        if self.centre is None or self.centre.ndim == 1 or self.centre.shape[1:] == tuple(size):
            return self
        top, left = ((n - m) // 2 for n, m in zip(self.centre.shape[1:], size, strict=True))
        cut = np.s_[:, top : top + size[0], left : left + size[1]]
        return Normalization(self.name, self.centre[cut].copy(), self.divisor[cut].copy())

    def __call__(self, images):
        """Normalized float32 images (n, C, H, W) of uint8 or float ones."""
        images = np.asarray(images)
        byte, images = images.dtype == np.uint8, images.astype(np.float32)
        if self.centre is None:
            return images / np.float32(255) if byte else images
        centre, divisor = (v if v.ndim == 3 else v[:, None, None] for v in self.arrays().values())
        return (images - centre) / divisor

    def check(self, shape):
        """UserError where this is not of images (C, H, W)."""
        if self.centre is not None and self.centre.shape not in (tuple(shape), tuple(shape[:1])):
            raise UserError(
                f"normalization {self.name}: expected statistics of images {tuple(shape)}, "
                f"got those of {self.centre.shape}"
            )


def read(name, arrays, channels):
    """The Normalization of images with so many channels that a file describes by its name and
    `Normalization.arrays`. ValueError where it describes none."""
    if name not in NAMES:
        raise ValueError(f"unknown normalization {name!r}")
    if name == "none":
        return unchanged(channels)
    if not arrays:
        if name != USUAL:
            raise ValueError(f"normalization {name}: no statistics")
        return Normalization()
    centre, divisor = (np.asarray(arrays[key], np.float32) for key in ("centre", "divisor"))
    if centre.shape != divisor.shape or not (divisor != 0).all():
        raise ValueError(f"normalization {name}: statistics that cannot be used")
    return Normalization(name, centre, divisor)


def normalization(name, datastore, world=None):
    """The Normalization `name` for a training set. Collective where it needs statistics.

    "none": pixels as they are. "rescale-zero-one": uint8 / 255; floats as they are.
    "rescale-symmetric": uint8 / 127.5 - 1; of floats, the training set's least and largest value of
    each channel become -1 and 1. "zerocenter": minus the mean of each channel.
    "zerocenter-element": minus the mean image. "zscore": minus the mean of each channel, divided by
    its standard deviation, that of all pixels.
    """
    if name not in NAMES:
        raise UserError(f"normalization must be one of {', '.join(NAMES)}, got {name}")
    channels = datastore.image_shape[0]
    whole = np.ones(channels, np.float32)
    if name == USUAL:
        return Normalization()
    if name == "none":
        return unchanged(channels)
    byte = datastore.dtype == np.uint8
    if name == "rescale-symmetric" and byte:
        return Normalization(name, 127.5 * whole, 127.5 * whole)
    if not len(datastore):
        raise UserError(f"normalization {name}: expected images, found none")
    found = statistics(datastore, world)
    if name == "rescale-symmetric":
        low, high = (v.astype(np.float64) for v in (found.low, found.high))
        flat = low == high  # nothing to divide by: all become 0
        return Normalization(
            name,
            ((low + high) / 2).astype(np.float32),
            np.where(flat, 1, (high - low) / 2).astype(np.float32),
        )
    if name == "zerocenter-element":
        mean = found.mean_image.astype(np.float32)
        return Normalization(name, mean, np.ones_like(mean))
    mean = found.mean.astype(np.float32)
    if name == "zerocenter":
        return Normalization(name, mean, whole)
    flat = found.variance <= FLAT * (found.mean**2)
    deviation = np.sqrt(np.where(flat, 1, found.variance))
    return Normalization(name, mean, deviation.astype(np.float32))


def unchanged(channels):
    """The Normalization "none": pixels as they are."""
    whole = np.ones(channels, np.float32)
    return Normalization("none", 0 * whole, whole)


@dataclass(frozen=True, eq=False)
class Statistics:
    """Of a set's images: mean_image (C, H, W) float64, and of each channel, (C,), mean and variance
    over all pixels in float64, least and largest value."""

    count: int
    mean_image: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    low: np.ndarray
    high: np.ndarray


def statistics(datastore, world=None):
    """The Statistics of all images of a set, each read once, by its rank. Collective.

    Of uint8 pixels the sums are whole numbers and exact; those of floats are added up by the fold
    over blocks of 16 images. So the result is the same on any number of ranks.
    """
    n, shape, world = len(datastore), datastore.image_shape, OneRank() if world is None else world
    leaves = blocks_of(n)
    tree = fold.Tree(leaves, fold.split_blocks(leaves, world.size), world.rank)
    mine, error = _Pass(tree, datastore), None
    try:
        mine.read(datastore, *(min(edge * LANES, n) for edge in tree.run))
    except UserError as problem:
        error = problem
    low, high, sums, squares = mine.low, mine.high, mine.sums, mine.squares
    if world.size > 1:
        world.raise_if_any(error)
        low, high = world.gop("min", low), world.gop("max", high)
        sums, squares = world.gop("sum", sums), world.gop("sum", squares)
    elif error is not None:
        raise error
    byte = datastore.dtype == np.uint8
    if byte:
        mean_image = sums / n
        total, pixels = sums.sum(axis=(1, 2)), n * shape[1] * shape[2]
        mean = total / pixels
        # exact: Python's whole numbers know no overflow, and one division rounds once
        variance = np.array(
            [
                (pixels * int(s) - int(t) ** 2) / pixels**2
                for s, t in zip(squares, total, strict=True)
            ]
        )
    else:
        width = int(np.prod(shape))
        packed = world.gplus(mine.counter.partial((1 + 2 * width,), np.float64))
        mean_image = packed[1 : 1 + width].reshape(shape)
        spread = packed[1 + width :].reshape(shape)
        mean = mean_image.mean(axis=(1, 2))
        within = spread.mean(axis=(1, 2)) / n
        variance = within + ((mean_image - mean[:, None, None]) ** 2).mean(axis=(1, 2))
    return Statistics(n, mean_image, mean, variance, low, high)


class _Pass:
    """What one rank adds up over its images: exact sums of bytes, the fold of floats."""

    def __init__(self, tree, datastore):
        channels = datastore.image_shape[0]
        self.low = np.full(channels, np.inf)
        self.high = -self.low
        self.sums = np.zeros(datastore.image_shape, np.int64)
        self.squares = np.zeros(channels, np.int64)
        self.counter = fold.Counter(tree, fold.merge_moments)

    def read(self, datastore, first, last):
        size = int(np.prod(datastore.image_shape)) * datastore.dtype.itemsize
        step = max(1, CHUNK // max(1, size * LANES)) * LANES
        for start in range(first, last, step):
            images = read_images(datastore, np.arange(start, min(start + step, last)))
            self.low = np.minimum(self.low, images.min(axis=(0, 2, 3)))
            self.high = np.maximum(self.high, images.max(axis=(0, 2, 3)))
            if images.dtype == np.uint8:
                self.sums += images.sum(axis=0, dtype=np.int64)
                for c in range(len(self.squares)):  # by how often each of the 256 values is there
                    often = np.bincount(images[:, c].ravel(), minlength=256)
                    self.squares[c] += int(often @ np.arange(256, dtype=np.int64) ** 2)
            else:
                for b in range(0, len(images), LANES):
                    self.counter.push(_moments(images[b : b + LANES].astype(np.float64)))


def _moments(block):
    """[count, mean, M2] of each pixel over a block's images (n <= 16, C, H, W), float64."""
    flat = block.reshape(len(block), -1)
    mean = flat.sum(axis=0) / len(flat)
    return np.concatenate([[float(len(flat))], mean, ((flat - mean) ** 2).sum(axis=0)])
