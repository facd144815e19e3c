"""Direct convolutions and dense layers of bfloat16 numbers, with the bytes of the C kernels.

Every sum has the order that kernels/cpu/value.h defines: pairs of channels, or of images, whose odd
member comes first. Arguments and results are float32 arrays. If both operands of the products are
rounded to bfloat16, the products are exact in float32. Otherwise, in forward passes of a single
channel, dx of filters from one channel to one channel, and gradients of few outputs, sums have
fused multiply-adds of the numbers as they are.
"""

import itertools
import math

import numpy as np

from mpidl.backends import shapes
from mpidl.backends.reference.bf16 import rounded
from mpidl.core.blocks import LANES

FEW_OUTPUTS = 8  # minimum outputs of a group for sums over images of rounded numbers
SEGMENT, GROUP = 256, 32  # of a dense layer: see kernels/cpu/dense.h


def conv2d(x, weight, bias, geometry):
    stride, padding, dilation, groups = geometry
    shape = shapes.conv2d_shape(x.shape[1:-1], weight.shape, stride, padding, dilation)
    outputs, inputs = len(weight) // groups, weight.shape[1]
    images, weight, add = _operands(x, weight, inputs > 1 or _is_pointwise(weight, geometry))
    images, y = _bordered(images, *padding), _zeros(len(x), shape)
    for group in range(groups):
        sums = y[:, group * outputs : (group + 1) * outputs]
        filters = weight[group * outputs : (group + 1) * outputs]
        for c, i, j in _taps(inputs, weight.shape[2:]):
            rows, columns = _windows((i, j), geometry, shape[1:])
            add(sums, filters[:, c, i, j], images[:, group * inputs + c, rows, columns])
    return _with_bias(y, bias)


def conv2d_dx(dy, image_shape, weight, geometry, bias=None):
    """Return the gradient with respect to images of this shape, plus the bias of each channel."""
    stride, ((top, _), (left, _)), dilation, groups = geometry
    outputs, inputs = len(weight) // groups, weight.shape[1]
    grads, weight, add = _operands(dy, weight, outputs > 1 or inputs > 1)
    border = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
    grads = _bordered(grads, *((n, n) for n in border))
    dx = _zeros(len(dy), image_shape)
    remainders = map(range, np.minimum(stride, image_shape[1:]))
    for group, row, column in itertools.product(range(groups), *remainders):
        sums = dx[:, group * inputs : (group + 1) * inputs, row :: stride[0], column :: stride[1]]
        for k, i, j in _taps(outputs, weight.shape[2:]):
            first, row_left = divmod(row + top - i * dilation[0], stride[0])
            start, column_left = divmod(column + left - j * dilation[1], stride[1])
            if row_left or column_left:
                continue
            first, start, k = first + border[0], start + border[1], group * outputs + k
            pixels = grads[:, k, first : first + sums.shape[2], start : start + sums.shape[3]]
            add(sums, weight[k, :, i, j], pixels)
    return _with_bias(dx, bias)


def conv2d_dweight(dy, x, weight, geometry):
    """Return a leaf for each block, (B, K, C/groups, R, S). Only the shape of weight is used."""
    outputs, taps = len(weight) // geometry.groups, math.prod(weight.shape[1:])
    is_banded = _is_pointwise(weight, geometry) and outputs % LANES == 0 and x.shape[1] >= 8
    if outputs >= FEW_OUTPUTS or is_banded:
        dy, x = rounded(dy), rounded(x)
    images, pixels = _bordered(x, *geometry.padding), dy.shape[2:-1]
    windows = (_windows(tap, geometry, pixels) for tap in np.ndindex(*weight.shape[2:]))
    columns = np.stack([images[:, :, rows, columns] for rows, columns in windows], axis=2)
    columns = columns.reshape(len(x), geometry.groups, taps, *pixels, LANES)
    grads = dy.reshape(len(x), geometry.groups, outputs, *pixels, LANES)
    if is_banded:
        sums = _sum_of_bands(grads, columns)
    elif outputs >= FEW_OUTPUTS:
        rows = _products(*(np.moveaxis(v, 3, 2) for v in (grads, columns)))
        sums = _total(np.moveaxis(rows, 2, 0))
    else:
        sums = np.zeros((*grads.shape[:3], taps, LANES), np.float32)
        for p, q in np.ndindex(pixels):
            sums = fused(grads[:, :, :, None, p, q], columns[:, :, None, :, p, q], sums)
        sums = _lane_sums(sums)
    return sums.reshape(len(x), *weight.shape)


def dense(x, weight, bias):
    """Return the scores (B, K, 16): the bias, and then the sum of each segment of features."""
    x, weight, y = rounded(x), rounded(weight), _zeros(len(x), (len(weight),))
    if bias is not None:
        y += bias[:, None]
    for first in range(0, x.shape[1], SEGMENT):
        segment = slice(first, first + SEGMENT)
        y += _sum_of_pairs(x[:, segment], weight[:, segment])
    return y


def dense_dx(dy, weight):
    """Return the gradient with respect to x, (B, F, 16): the sum of the groups of outputs."""
    dy, weight, pairs = rounded(dy), rounded(weight), -(-dy.shape[1] // 2)
    groups = -(-dy.shape[1] // GROUP)
    edges = [2 * (pairs * group // groups) for group in range(groups + 1)]
    parts = (slice(*edge) for edge in itertools.pairwise(edges))
    return _total(_sum_of_pairs(dy[:, part], weight[part].T) for part in parts)


def dense_dweight(dy, x):
    """Return a leaf for each block, (B, K, F)."""
    return _products(rounded(dy)[:, :, None], rounded(x)[:, :, None])


def channel_sums(x):
    """Return the sums of each block's channels, (B, C), over the pixels and lanes."""
    rows = x if x.ndim == 5 else x.reshape(*x.shape[:2], 1, math.prod(x.shape[2:-1]), LANES)
    sums = np.zeros((*x.shape[:2], 4, LANES), np.float32)
    for p, q in np.ndindex(rows.shape[2:4]):
        sums[:, :, q % 4] += rows[:, :, p, q]
    return _lane_sums((sums[:, :, 0] + sums[:, :, 1]) + (sums[:, :, 2] + sums[:, :, 3]))


def fused(a, b, c):
    """Return a * b + c of float32 arrays, rounded once."""
    product, c = np.multiply(a, b, dtype=np.float64), c.astype(np.float64)  # the product is exact
    total = product + c
    of_c = total - product
    error = (product - (total - of_c)) + (c - of_c)
    # If the last bit is odd, the second rounding cannot be a tie (rounding to odd).
    is_even = total.view(np.int64) & 1 == 0
    odd = np.nextafter(total, np.copysign(np.inf, error))
    return np.where((error != 0) & np.isfinite(error) & is_even, odd, total).astype(np.float32)


def _operands(images, weight, is_rounded):
    """Return the operands of the products, and the function that adds products to sums."""
    if is_rounded:
        return rounded(images), rounded(weight), _add_products
    return images, weight.astype(np.float32), _add_fused


def _add_products(sums, weights, pixels):
    for of_block, numbers in zip(sums, pixels, strict=True):  # the products stay in the cache
        of_block += weights[:, None, None, None] * numbers


def _add_fused(sums, weights, pixels):
    sums[...] = fused(weights[:, None, None, None], pixels[:, None], sums)


def _is_pointwise(weight, geometry):
    has_padding = geometry.padding != ((0, 0), (0, 0))
    return weight.shape[2:] == (1, 1) and geometry.groups == 1 and not has_padding


def _taps(channels, size):
    """Yield (channel, row, column) of each tap, in the order of a sum over channels."""
    for even in range(0, channels, 2):
        for row, column in np.ndindex(*size):
            for channel in (even + 1, even):
                if channel < channels:
                    yield channel, row, column


def _windows(tap, geometry, output):
    """Return the rows and columns of padded images that a tap reads for an output (P, Q)."""
    sizes = zip(tap, geometry.stride, geometry.dilation, output, strict=True)
    rows, columns = (slice(i * d, i * d + s * (n - 1) + 1, s) for i, s, d, n in sizes)
    return rows, columns


def _bordered(images, *borders):
    return np.pad(images, ((0, 0), (0, 0), *borders, (0, 0)))


def _zeros(blocks, shape):
    return np.zeros((blocks, *shape, LANES), np.float32)


def _with_bias(sums, bias):
    """Add the bias of each channel, which comes after the products."""
    return sums if bias is None else sums + bias[:, None, None, None]


def _products(grads, columns):
    """Return sums over pixels and images: (..., K, n, 16) and (..., T, n, 16) give (..., K, T)."""
    sums = np.zeros((*grads.shape[:-2], columns.shape[-3]), np.float32)
    for pixel, lane in np.ndindex(grads.shape[-2:]):
        lane ^= 1  # the second image of a pair comes first
        sums += grads[..., :, None, pixel, lane] * columns[..., None, :, pixel, lane]
    return sums


def _sum_of_pairs(x, weight):
    """Return the sum over channels of x (B, C, 16) by weight (K, C), as (B, K, 16)."""
    sums = _zeros(len(x), (len(weight),))
    for channel, _, _ in _taps(x.shape[1], (1, 1)):
        sums += weight[:, channel, None] * x[:, channel, None]
    return sums


def _sum_of_bands(grads, columns):
    """Return the same for all pixels of images. Each band of pixels has a sum of its own."""
    pixels = math.prod(grads.shape[3:-1])
    grads, columns = (v.reshape(*v.shape[:3], pixels, LANES) for v in (grads, columns))
    channels = grads.shape[2] + columns.shape[2]
    longest = (512 << 10) // (channels * LANES * 2)  # see pass_of in pointwise.c
    longest = min(max(longest, 6), 96) // 6 * 6
    bands = -(-pixels // longest)
    bands = -(-pixels // -(-pixels // bands))
    edges = [pixels * band // bands for band in range(bands + 1)]
    parts = (slice(*edge) for edge in itertools.pairwise(edges))
    return _total(_products(grads[..., part, :], columns[..., part, :]) for part in parts)


def _total(parts):
    """Add up arrays, from the first to the last."""
    first, *rest = parts
    for part in rest:
        first = part + first
    return first


def _lane_sums(x):
    """Add up the last axis, adjacent numbers first."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]
