"""Prepare images with the C kernels.

The module `backends.training_interface` documents the functions, except `planes_of_arrow`. Every
function runs only in the calling thread. Several threads may call the functions at the same time to
prepare mini-batches in advance. `MemoryImages` uses all threads of the kernels.
"""

import functools

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.builds import kernels
from mpidl.core import keyed
from mpidl.core.blocks import LANES, blocks_of


def images(
    pixels,
    size=None,
    mirrored=None,
    top=None,
    left=None,
    fill=None,
    centre=None,
    divisor=None,
    out=None,
):
    pixels = np.ascontiguousarray(pixels)
    count, *image = pixels.shape
    p, q = image[1:] if size is None else size
    lanes = arenas.empty((blocks_of(count), image[0], p, q, LANES)) if out is None else out
    moves = (_or_none(m, np.int32) for m in (mirrored, top, left))
    fill = _or_none(fill, pixels.dtype)
    numbers = (_or_none(v, np.float32) for v in (centre, divisor))
    shape = np.array([*image, p, q, centre is not None and np.ndim(centre) == 3], np.int64)
    call = kernels().images if pixels.dtype == np.uint8 else kernels().images_of_floats
    call(pixels, count, shape, *moves, fill, *numbers, lanes)
    return lanes


class MemoryImages:
    """Images and labels in memory, from which one call of a kernel prepares a mini-batch.

    Parameters
    ----------
    images : (n, C, H, W) float32 or uint8
        The images, C-ordered.
    labels : (n,) int64 or None
        Their labels, C-ordered.
    classes : int or None
        Number of classes, if labels must be below this number.
    ignore_label : int or None
        A label that is valid although it is outside 0..classes-1.
    size : (P, Q)
        Size of the normalized images; (H, W) if the pixels are floats.
    centre, divisor : (C,) or (C, H, W) float32, optional
        Normalized pixels are (pixel - centre) / divisor.
    """

    def __init__(self, images, labels, classes, ignore_label, size, centre=None, divisor=None):
        of_pixels = centre is not None and np.ndim(centre) == 3
        both = (images, None) if images.dtype == np.float32 else (None, images)
        self._source = *both, labels, len(images)
        self._shape = np.array([*images.shape[1:], *size, of_pixels], np.int64)
        statistics = (_or_none(v, np.float32) for v in (centre, divisor))
        classes = -1 if classes is None else classes
        ignored = -(1 << 63) if ignore_label is None else ignore_label
        self._rules = *statistics, classes, ignored

    def prepare(self, samples, lanes, labels, mirrored=None, top=None, left=None, fill=None):
        """Write the images and labels of a mini-batch to `lanes` and `labels`.

        All threads of the library share the work, so other threads wait for their kernels.

        Parameters
        ----------
        samples : (count,) int64
            Sample numbers, from 0. Sample s refers to image s % n.
        lanes : (blocks, C, P, Q, 16) float32
            Array for the normalized images; unused lanes become 0.
        labels : (blocks, 16) int32 or None
            Array for the labels; unused lanes become 0.
        mirrored, top, left, fill
            The moves of each image, as for `Backend.images`. Images of floats cannot be moved.

        Returns
        -------
        bool
            False if a pixel is not finite, or if a label is invalid.
        """
        moves = *(_or_none(m, np.int32) for m in (mirrored, top, left)), _or_none(fill, np.uint8)
        arguments = samples, len(samples), self._shape, *moves, *self._rules, lanes, labels
        return bool(kernels().minibatch(*self._source, *arguments))


def _or_none(option, dtype):
    return None if option is None else np.ascontiguousarray(option, dtype)


def warp(pixels, maps, size, fill):
    pixels = np.ascontiguousarray(pixels)
    n, *image = pixels.shape
    out = np.empty((n, image[0], *size), pixels.dtype)
    maps, fill = np.ascontiguousarray(maps, np.float64), np.ascontiguousarray(fill, pixels.dtype)
    call = kernels().warp if pixels.dtype == np.uint8 else kernels().warp_of_floats
    call(pixels, n, np.array([*image, *size], np.int64), maps, fill, out)
    return out


def planes(pixels, out=None):
    height, width, stride = pixels.shape
    if pixels.strides[1:] != (stride, 1):
        raise ValueError(f"expected contiguous pixels, got strides {pixels.strides}")
    shape, out = _planes(height, width, stride, pixels.strides[0], out)
    # Pass the rows as one array of bytes; `shape` contains the distance between rows.
    run = np.lib.stride_tricks.as_strided(pixels, (height * width * stride,), (1,))
    kernels().planes(run, shape, out)
    return out


def planes_of_arrow(address, height, width, stride, out=None):
    """Convert the pixel rows in a struct ArrowArray to planes, as `planes` does for an array.

    Parameters
    ----------
    address : int
        Address of the struct, which the Arrow C data interface defines. There must be no gaps
        between the rows.
    height, width, stride : int
        Height and width in pixels, and the number of bytes per pixel.
    out : (C, H, W) uint8, optional
        Array for the result.

    Returns
    -------
    (C, H, W) uint8
    """
    shape, out = _planes(height, width, stride, width * stride, out)
    kernels().planes_of_arrow(address, shape, out)
    return out


def _planes(height, width, stride, row, out):
    channels = 1 if stride == 1 else 3
    out = np.empty((channels, height, width), np.uint8) if out is None else out
    if out.shape != (channels, height, width):
        raise ValueError(f"expected {(channels, height, width)}, got {out.shape} to write to")
    return _picture(channels, height, width, stride, row), out


@functools.lru_cache(maxsize=64)
def _picture(*shape):
    """Return an int64 array laid out as `struct picture` in kernels/cpu/images.c."""
    return np.array(shape, np.int64)


def keyed_words(seed, purpose, count, epoch, samples):
    words = np.empty((len(samples), count), np.uint64)
    samples = np.ascontiguousarray(samples, np.int64)
    key = keyed.key_of(seed, purpose).view(np.int64)
    kernels().keyed_words(key, epoch, samples, len(samples), count, words.view(np.int64))
    return words
