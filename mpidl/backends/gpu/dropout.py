"""Dropout by kernels/cuda/dropout.cu."""

import math

from mpidl.backends.gpu import array, launching
from mpidl.backends.reference.dropout import GROUP

THREADS = 256


def dropout(x, threshold, scale, key, epoch, samples):
    """x * scale, and 0 where the element's chance is below `threshold` (of 65536): the bytes of
    `reference_more.dropout`, which says what an element's chance is. epoch (1,) and samples
    (B * 16,) are int32 Arrays, which a recorded step reads anew."""
    blocks, channels, *pixels, lanes = x.dims
    pixels = math.prod(pixels)
    if pixels == 1:  # features, which lie one after the other
        channels, pixels = 1, channels
    parts = -(-channels * -(-pixels // GROUP) // THREADS)
    y = array.empty_like(x)
    numbers = threshold, scale, *key, channels, pixels, parts
    launching.launch("dropout", blocks * lanes * parts, THREADS, x, y, epoch, samples, *numbers)
    return y
