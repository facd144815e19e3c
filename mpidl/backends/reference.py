"""NumPy backend: one block at a time, BLAS for the products.

Every BLAS call is one block at one fixed shape (16 lanes, full or not), because BLAS picks its
kernel, and with it the rounding, by the shape of the call. Every sum over images goes to the fold
as one leaf per block. `counts` are the valid images of each block, `tree` this mini-batch's tree.

Shapes: x (B, C, H, W, 16), weight (K, C/groups, R, S), y (B, K, P, Q, 16), B blocks of this rank.
`stride` and `dilation` are (down, across), `padding` is ((top, bottom), (left, right)).
"""

import numpy as np

from mpidl.backends.reference_conv import channel_sums as channel_sums
from mpidl.backends.reference_conv import conv2d as conv2d
from mpidl.backends.reference_conv import conv2d_dweight as conv2d_dweight
from mpidl.backends.reference_conv import conv2d_dx as conv2d_dx
from mpidl.backends.reference_conv import conv2d_shape as conv2d_shape
from mpidl.backends.reference_conv import transposed_conv2d as transposed_conv2d
from mpidl.backends.reference_conv import transposed_conv2d_backward as transposed_conv2d_backward
from mpidl.backends.reference_ends import sgdm as sgdm
from mpidl.backends.reference_images import images as images
from mpidl.backends.reference_images import keyed_words as keyed_words
from mpidl.backends.reference_images import planes as planes
from mpidl.backends.reference_images import warp as warp
from mpidl.backends.reference_loss import correct_count as correct_count
from mpidl.backends.reference_loss import cross_entropy as cross_entropy
from mpidl.backends.reference_loss import cross_entropy_dlogits as cross_entropy_dlogits
from mpidl.backends.reference_loss import errors as errors
from mpidl.backends.reference_loss import errors_dy as errors_dy
from mpidl.backends.reference_loss import image_sums as image_sums
from mpidl.backends.reference_loss import softmax as softmax
from mpidl.backends.reference_loss import softmax_dx as softmax_dx
from mpidl.backends.reference_more import add as add
from mpidl.backends.reference_more import concat as concat
from mpidl.backends.reference_more import cross_channel_norm as cross_channel_norm
from mpidl.backends.reference_more import cross_channel_norm_dx as cross_channel_norm_dx
from mpidl.backends.reference_more import dropout as dropout
from mpidl.backends.reference_more import leaky_relu as leaky_relu
from mpidl.backends.reference_more import leaky_relu_dx as leaky_relu_dx
from mpidl.backends.reference_more import sigmoid as sigmoid
from mpidl.backends.reference_more import sigmoid_dx as sigmoid_dx
from mpidl.backends.reference_more import split as split
from mpidl.backends.reference_more import tanh as tanh
from mpidl.backends.reference_more import tanh_dx as tanh_dx
from mpidl.backends.reference_optimizer import adam as adam
from mpidl.backends.reference_optimizer import clip as clip
from mpidl.backends.reference_optimizer import rmsprop as rmsprop
from mpidl.backends.reference_optimizer import step_number as step_number
from mpidl.backends.reference_statistics import batchnorm_factors as batchnorm_factors
from mpidl.backends.reference_statistics import predict_scale as predict_scale
from mpidl.backends.reference_statistics import running as running
from mpidl.backends.reference_statistics import source as source
from mpidl.backends.reference_statistics import statistics as statistics
from mpidl.backends.reference_statistics import zeros_like as zeros_like
from mpidl.fold import Counter, merge_moments


def conv2d_backward(dy, x, weight, stride, padding, dilation, groups, counts, tree, needs):
    """(dx, dweight, dbias, None): the gradients that `needs` wants, None for the others."""
    how = stride, padding, dilation, groups
    return (
        conv2d_dx(dy, x, weight, *how) if needs[0] else None,
        conv2d_dweight(dy, x, weight, *how, tree) if needs[1] else None,
        channel_sums(dy, tree) if needs[2] else None,
        None,  # of an activation that is not stored, which there is none of here
    )


def moments(x, counts, tree):
    """Partial of (count, mean, M2) by channel, packed for `merge_moments`: (1 + 2C,) float64.

    The mean is taken first and M2 about it; the mean's own rounding is corrected.
    """
    channels = x.shape[1]
    counter = Counter(tree, merge_moments)
    for block, valid in zip(x, counts, strict=True):
        values = np.ascontiguousarray(block[..., :valid]).reshape(channels, -1)
        count = values.shape[1]
        mean = values.mean(axis=1, keepdims=True)
        centred = values - mean
        error = centred.sum(axis=1).astype(np.float64) / count
        np.square(centred, out=centred)
        m2 = centred.sum(axis=1).astype(np.float64) - count * error * error
        counter.push(np.concatenate([[count], mean[:, 0] + error, m2]))
    return counter.partial((1 + 2 * channels,), np.float64)


def _per_channel(vector, dtype, ndim):
    return np.asarray(vector, dtype).reshape(-1, *(1,) * (ndim - 2))


def batchnorm(x, mean, scale, beta):
    """y = (x - mean) * scale + beta, each by channel."""
    mean, scale, beta = (_per_channel(v, x.dtype, x.ndim) for v in (mean, scale, beta))
    y = np.empty_like(x)
    for block, out in zip(x, y, strict=True):
        np.subtract(block, mean, out=out)
        out *= scale
        out += beta
    return y


def batchnorm_sums(dy, x, mean, tree):
    """Partial of [sum of dy, sum of dy * (x - mean)] by channel: (2C,) float64."""
    channels = x.shape[1]
    mean = _per_channel(mean, x.dtype, x.ndim)
    counter = Counter(tree)
    for grad, block in zip(dy, x, strict=True):
        product = block - mean
        product *= grad
        sums = [v.reshape(channels, -1).sum(axis=1) for v in (grad, product)]
        counter.push(np.concatenate(sums).astype(np.float64))
    return counter.partial((2 * channels,), np.float64)


def batchnorm_dx(dy, x, mean, a, b, c, counts):
    """dx = a * dy + b * (x - mean) + c by channel, zero in unused lanes."""
    mean, a, b, c = (_per_channel(v, x.dtype, x.ndim) for v in (mean, a, b, c))
    dx = np.empty_like(x)
    for grad, block, out, valid in zip(dy, x, dx, counts, strict=True):
        np.subtract(block, mean, out=out)
        out *= b
        out += c
        out += a * grad
        out[..., valid:] = 0
    return dx


def relu(x):
    """max(x, 0)."""
    return np.maximum(x, 0)


def relu_dx(dy, y):
    """dy where y > 0, else 0."""
    return np.multiply(dy, y > 0)


def pool2d_shape(x_shape, size, stride, padding):
    """(C, P, Q) of pooling one (C, H, W) image."""
    return conv2d_shape(x_shape, (x_shape[0], 1, *size), stride, padding, (1, 1))


def _places(x_shape, size, stride, padding):
    """Of each place in the window, row by row: its number, which windows have a pixel of the image
    there, and those pixels, the latter two as indices of (C, P, Q, 16) and (C, H, W, 16)."""

    def axis(place, pixels, outputs, step, before):
        first = max(0, -(-(before - place) // step))
        stop = min(outputs, (pixels - 1 + before - place) // step + 1)
        start = first * step + place - before
        return slice(first, stop), slice(start, start + (stop - first - 1) * step + 1, step)

    _, p, q = pool2d_shape(x_shape, size, stride, padding)
    for i in range(size[0]):
        rows = axis(i, x_shape[1], p, stride[0], padding[0][0])
        for j in range(size[1]):
            columns = axis(j, x_shape[2], q, stride[1], padding[1][0])
            windows, pixels = zip(rows, columns, strict=True)
            if all(s.start < s.stop for s in windows):
                yield i * size[1] + j, (slice(None), *windows), (slice(None), *pixels)


def max_pool2d(x, size, stride, padding):
    """(y, argmax): the largest pixel of each window, and its place in the window, counted row by
    row, as uint8. Of equal pixels the first; padding never; NaN where a pixel is NaN."""
    shape = pool2d_shape(x.shape[1:-1], size, stride, padding)
    y = np.empty((len(x), *shape, x.shape[-1]), x.dtype)
    argmax = np.empty(y.shape, np.uint8)
    # the first pixel of each window that is not padding
    down, across = (
        np.maximum(0, before - np.arange(n) * step)
        for n, step, (before, _) in zip(shape[1:], stride, padding, strict=True)
    )
    first = (down[:, None] * size[1] + across)[..., None]
    for b, block in enumerate(x):
        best, place = y[b], argmax[b]
        best[...], place[...] = -np.inf, first
        for number, windows, pixels in _places(x.shape[1:-1], size, stride, padding):
            value = block[pixels]
            larger = (value > best[windows]) | np.isnan(value)
            np.copyto(best[windows], value, where=larger)
            np.copyto(place[windows], number, where=larger)
    return y, argmax


def max_pool2d_dx(dy, argmax, x, size, stride, padding, tree):
    """(gradient with respect to x, None); of x only shape and type are used."""
    dx = np.zeros_like(x)
    for grad, place, out in zip(dy, argmax, dx, strict=True):
        for number, windows, pixels in _places(x.shape[1:-1], size, stride, padding):
            out[pixels] += np.where(place[windows] == number, grad[windows], 0)
    return dx, None


def average_pool2d(x, size, stride, padding):
    """The mean of each window, in which padding counts as zeros."""
    shape = pool2d_shape(x.shape[1:-1], size, stride, padding)
    y = np.zeros((len(x), *shape, x.shape[-1]), x.dtype)
    for block, out in zip(x, y, strict=True):
        for _, windows, pixels in _places(x.shape[1:-1], size, stride, padding):
            out[windows] += block[pixels]
        out /= size[0] * size[1]
    return y


def average_pool2d_dx(dy, x, size, stride, padding, tree):
    """(gradient with respect to x, None); of x only shape and type are used."""
    dx = np.zeros_like(x)
    for grad, out in zip(dy, dx, strict=True):
        part = grad / x.dtype.type(size[0] * size[1])
        for _, windows, pixels in _places(x.shape[1:-1], size, stride, padding):
            out[pixels] += part[windows]
    return dx, None


def dense(x, weight, bias):
    """y = weight @ x + bias; x (B, F, 16), weight (K, F), bias (K,), y (B, K, 16)."""
    y = np.empty((len(x), len(weight), x.shape[-1]), x.dtype)
    for block, out in zip(x, y, strict=True):
        np.matmul(weight, block, out=out)
        out += bias[:, None]
    return y


def dense_dx(dy, weight):
    """Gradient with respect to x: (B, F, 16)."""
    dx = np.empty((len(dy), weight.shape[1], dy.shape[-1]), dy.dtype)
    for grad, out in zip(dy, dx, strict=True):
        np.matmul(weight.T, grad, out=out)
    return dx


def dense_dweight(dy, x, tree):
    """Partial of the gradient with respect to weight: (K, F)."""
    counter = Counter(tree)
    for grad, block in zip(dy, x, strict=True):
        counter.push(grad @ block.T)
    return counter.partial((dy.shape[1], x.shape[1]), x.dtype)


def dense_backward(dy, x, weight, tree, needs):
    """(dx, dweight, dbias, None): the gradients that `needs` wants, None for the others."""
    return (
        dense_dx(dy, weight) if needs[0] else None,
        dense_dweight(dy, x, tree) if needs[1] else None,
        channel_sums(dy, tree) if needs[2] else None,
        None,  # as of conv2d_backward
    )
