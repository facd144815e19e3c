"""Compute dropout with the CUDA kernel in kernels/cuda/dropout.cu."""

import math

from mpidl.backends.gpu import array, launching
from mpidl.backends.reference.dropout import GROUP

THREADS = 256


def dropout(x, threshold, scale, key, epoch, samples, whole_images):
    blocks, channels, *pixels, lanes = x.dims
    pixels = math.prod(pixels)
    if pixels == 1:  # the channels are features, which are stored contiguously
        channels, pixels = 1, channels
    parts = -(-channels * -(-pixels // GROUP) // THREADS)
    y = array.empty_like(x)
    numbers = threshold, scale, *key, channels, pixels, parts, int(whole_images)
    launching.launch("dropout", blocks * lanes * parts, THREADS, x, y, epoch, samples, *numbers)
    return y
