"""Compute dropout with the C kernel."""

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import sizes
from mpidl.backends.cpu.builds import kernels


def dropout(x, threshold, scale, key, epoch, samples, whole_images):
    y = arenas.empty(x.shape, x.dtype)
    blocks, channels, pixels = sizes(x)
    samples = np.ascontiguousarray(samples, np.int64)
    numbers = blocks, channels * pixels, threshold, scale, epoch, *key, whole_images
    kernels().dropout(np.ascontiguousarray(x), y, samples, *numbers)
    return y
