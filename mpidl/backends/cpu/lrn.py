"""Compute cross-channel (local response) normalization with the C kernels."""

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import sizes
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.pool import geometry


def cross_channel_norm(x, norm):
    y = arenas.empty(x.shape, x.dtype)
    kernels().cross_channel_norm(np.ascontiguousarray(x), y, *sizes(x), *norm)
    return y


def cross_channel_norm_dx(dy, x, norm):
    dx = arenas.empty(x.shape, x.dtype)
    dy, x = np.ascontiguousarray(dy), np.ascontiguousarray(x)
    kernels().cross_channel_norm_dx(dy, x, dx, *sizes(x), *norm)
    return dx


def norm_max_pool(x, norm, windows):
    blocks, *image, lanes = x.shape
    shape, output = geometry(tuple(image), windows)
    y = arenas.empty((blocks, *output, lanes), x.dtype)
    argmax = arenas.empty(y.shape, np.uint8)
    x = np.ascontiguousarray(x)
    kernels().norm_max_pool(x, y, argmax, blocks, shape, *norm)
    return y, argmax


def norm_max_pool_relu_dx(dy, argmax, x, norm, windows):
    blocks, *image, _ = x.shape
    shape, _ = geometry(tuple(image), windows)
    dz = arenas.empty(x.shape, x.dtype)
    dy, x = np.ascontiguousarray(dy), np.ascontiguousarray(x)
    kernels().norm_max_pool_relu_dx(dy, argmax, x, dz, blocks, shape, *norm)
    return dz
