"""Activations, dropout, cross-channel normalization, sums and concatenations by the CUDA kernels
activations.cu, dropout.cu, lrn.cu and concat.cu."""

import math

from mpidl.backends.gpu import array, elementwise, launching
from mpidl.backends.gpu.batchnorm import read
from mpidl.backends.reference_more import GROUP, window_of

THREADS = 256  # of all kernels here
SHARED = 48 << 10  # bytes that every GPU gives a block


def _by_element(name, *arrays, scale=()):
    """What a kernel makes of arrays that lie alike in memory."""
    x = arrays[-1]
    if any((a.dims, a.order) != (x.dims, x.order) for a in arrays):
        raise ValueError(f"{name}: expected arrays that lie alike, got {arrays}")
    y = array.empty_like(x)
    blocks = min(-(-x.size // (4 * THREADS)), 16 * launching.device().processors)
    launching.launch(f"activation_{name}", blocks, THREADS, *arrays, y, *scale, x.size)
    return y


def leaky_relu(x, scale):
    """x where it is > 0, else scale * x."""
    return _by_element("leaky", x, scale=(scale,))


def leaky_relu_dx(dy, y, scale):
    """dy where y > 0, else scale * dy; scale >= 0, so that y has the sign of x."""
    return _by_element("leaky_dx", dy, y, scale=(scale,))


def tanh(x):
    """Hyperbolic tangent, at most 2 ulp off."""
    return _by_element("tanh", x)


def tanh_dx(dy, y):
    """dy * (1 - y**2)."""
    return _by_element("tanh_dx", dy, y)


def sigmoid(x):
    """1 / (1 + exp(-x)), at most 2.5 ulp off."""
    return _by_element("sigmoid", x)


def sigmoid_dx(dy, y):
    """dy * y * (1 - y)."""
    return _by_element("sigmoid_dx", dy, y)


def _rows(what, x):
    """(rows, channels): how many pixels there are in all, and what memory has of each."""
    blocks, channels, *pixels, lanes = x.dims
    if len(x.shape) < len(x.dims) and math.prod(pixels) > 1:
        raise ValueError(
            f"{what}: on a GPU expected images or features, got flattened images {x.dims}: do it "
            "before they are flattened"
        )
    return blocks * lanes * math.prod(pixels), channels


def _moved(name, part, whole, first):
    """Launch concat or split for one part."""
    rows, words = _rows(name, part)
    blocks = min(-(-part.size // (4 * THREADS)), 32 * launching.device().processors)
    launching.launch(name, blocks, THREADS, part, whole, rows, words, _rows(name, whole)[1], first)


def concat(arrays):
    """Values (B, C1, ..., 16), (B, C2, ..., 16), ... as one, (B, C1 + C2 + ..., ..., 16); each an
    Array or a DeferredInput. ValueError for flattened images."""
    parts = [read(a) for a in arrays]
    blocks, _, *rest = parts[0].shape
    y, first = array.empty_lanes((blocks, sum(p.shape[1] for p in parts), *rest)), 0
    for part in parts:
        _moved("concat", part, y, first)
        first += part.shape[1]
    return y


def split(x, channels):
    """The inverse of `concat`: a list of values with so many channels each."""
    found, first = [], 0
    blocks, _, *rest = x.shape
    for count in channels:
        part = array.empty_lanes((blocks, count, *rest))
        _moved("split", part, x, first)
        found.append(part)
        first += count
    return found


def add(a, b):
    """a + b, each an Array or a DeferredInput."""
    return elementwise.add(read(a), read(b))


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


def _norm(x, window, alpha, k):
    """What both kernels take first."""
    rows, channels = _rows("cross_channel_norm", x)
    before, behind = (min(side, channels - 1) for side in window_of(window))
    return rows, channels, before, behind, alpha / window, k


def cross_channel_norm(x, window, alpha, beta, k):
    """y = x * d**-beta with d = k + alpha / window * (sum of x**2 over the window's channels)."""
    numbers = _norm(x, window, alpha, k)
    y = array.empty_like(x)
    blocks = min(-(-x.size // THREADS), 32 * launching.device().processors)
    launching.launch("lrn", blocks, THREADS, x, y, *numbers, beta)
    return y


def cross_channel_norm_dx(dy, x, window, alpha, beta, k):
    """Gradient with respect to x; d is computed again."""
    numbers = _norm(x, window, alpha, k)
    rows, channels, before, behind = numbers[:4]
    if before + behind > SHARED // 8:
        raise ValueError(
            f"cross_channel_norm: on a GPU a window has at most {SHARED // 8} channels, got "
            f"{before + 1 + behind}"
        )
    width = min(channels, 4 * THREADS)
    height = max(1, 4 * THREADS // width)
    height = max(1, min(height, SHARED // 4 // (width + before + behind)))
    dx = array.empty_like(x)
    launching.launch(
        "lrn_dx",
        (-(-rows // height), -(-channels // width)),
        THREADS,
        dy,
        x,
        dx,
        *numbers,
        beta,
        2 * alpha * beta / window,
        height,
        width,
        shared=4 * height * (width + before + behind),
    )
    return dx
