"""Compute cross-channel (local response) normalization with the C kernels."""

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import sizes
from mpidl.backends.cpu.builds import kernels


def cross_channel_norm(x, window, alpha, beta, k):
    y = arenas.empty(x.shape)
    kernels().cross_channel_norm(np.ascontiguousarray(x), y, *sizes(x), window, alpha, beta, k)
    return y


def cross_channel_norm_dx(dy, x, window, alpha, beta, k):
    dx = arenas.empty(x.shape)
    dy, x = np.ascontiguousarray(dy), np.ascontiguousarray(x)
    kernels().cross_channel_norm_dx(dy, x, dx, *sizes(x), window, alpha, beta, k)
    return dx
