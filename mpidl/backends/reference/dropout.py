"""NumPy backend, part of `reference`: activations, dropout, cross-channel normalization, sums
and concatenations of values. Shapes as there; in float64 for float64 arrays."""

import numpy as np

CHANCES = 1 << 16  # of dropout: an element is dropped in so many of them
GROUP = 8  # elements that one call of the generator serves
ROUNDS = 10  # of Philox


def leaky_relu(x, scale):
    """x where it is > 0, else scale * x."""
    return np.where(x > 0, x, x * x.dtype.type(scale))


def leaky_relu_dx(dy, y, scale):
    """dy where y > 0, else scale * dy; scale >= 0, so that y has the sign of x."""
    return np.where(y > 0, dy, dy * dy.dtype.type(scale))


def tanh(x):
    """Hyperbolic tangent."""
    return np.tanh(x)


def tanh_dx(dy, y):
    """dy * (1 - y**2)."""
    return dy * (1 - y * y)


def sigmoid(x):
    """1 / (1 + exp(-x)), by the exponential of -|x|, which cannot overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def sigmoid_dx(dy, y):
    """dy * y * (1 - y)."""
    return dy * y * (1 - y)


def add(a, b):
    """a + b."""
    return a + b


def concat(arrays):
    """Values (B, C1, ..., 16), (B, C2, ..., 16), ... as one, (B, C1 + C2 + ..., ..., 16)."""
    return np.concatenate(arrays, axis=1)


def split(x, channels):
    """The inverse of `concat`: a list of values with so many channels each."""
    return [np.ascontiguousarray(v) for v in np.split(x, np.cumsum(channels)[:-1], axis=1)]


def window_of(window):
    """(channels before, channels behind) one that its sum of squares goes over: of an even window
    the one more is behind, as MATLAB has it."""
    return (window - 1) // 2, window // 2


def _over(x, before, behind):
    """The sum of x, (C, ..., 16), over the channels c - before .. c + behind."""
    total = np.zeros_like(x)
    last = len(x) - 1
    for step in range(-min(before, last), min(behind, last) + 1):
        to = slice(max(0, -step), min(len(x), len(x) - step))
        total[to] += x[max(0, step) : len(x) + min(0, step)]
    return total


def cross_channel_norm(x, window, alpha, beta, k):
    """y = x * d**-beta with d = k + alpha / window * (sum of x**2 over the window's channels)."""
    before, behind = window_of(window)
    y = np.empty_like(x)
    for block, out in zip(x, y, strict=True):
        d = x.dtype.type(k) + x.dtype.type(alpha / window) * _over(block**2, before, behind)
        out[...] = block * d ** x.dtype.type(-beta)
    return y


def cross_channel_norm_dx(dy, x, window, alpha, beta, k):
    """dx = dy * d**-beta - 2 * alpha * beta / window * x * (sum of dy * x * d**(-beta - 1) over the
    channels in whose window this one is)."""
    before, behind = window_of(window)
    kind = x.dtype.type
    dx = np.empty_like(x)
    for grad, block, out in zip(dy, x, dx, strict=True):
        d = kind(k) + kind(alpha / window) * _over(block**2, before, behind)
        power = d ** kind(-beta)
        sums = _over(grad * block * power / d, behind, before)
        out[...] = grad * power - kind(2 * alpha * beta / window) * block * sums
    return dx


def philox(counter, key):
    """Philox4x32-10: four arrays of 32-bit words for a counter of four and a key of two.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; all are uint64 arrays or
    numbers below 2**32, that broadcast.
    """
    a, b, c, d = (np.asarray(v, np.uint64) for v in counter)
    low, high = (np.uint64(v) for v in key)
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(ROUNDS):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (second >> half) ^ b ^ low, second & mask
        c, d = (first >> half) ^ d ^ high, first & mask
        low = (low + np.uint64(0x9E3779B9)) & mask
        high = (high + np.uint64(0xBB67AE85)) & mask
    return a, b, c, d


def chances(elements, samples, epoch, key):
    """(elements, len(samples)) numbers 0 .. 65535, each keyed by (key, epoch, sample, element).

    Eight consecutive elements of a sample share a call of Philox4x32-10, whose counter is
    (element // 8, sample's low and high 32 bits, epoch): element e has bits 0-15 (e even) or 16-31
    (e odd) of word e // 2 % 4.
    """
    samples = np.asarray(samples, np.int64).astype(np.uint64)
    groups = np.arange(-(-elements // GROUP), dtype=np.uint64)[:, None]
    half = np.uint64(32)
    words = philox((groups, samples & np.uint64(0xFFFFFFFF), samples >> half, epoch), key)
    words = [np.broadcast_to(word, (len(groups), len(samples))) for word in words]
    halves = [part for word in words for part in (word & np.uint64(0xFFFF), word >> np.uint64(16))]
    return np.stack(halves, axis=1).reshape(-1, len(samples))[:elements]


def dropout(x, threshold, scale, key, epoch, samples):
    """x * scale, and 0 where the element's chance is below `threshold` (of 65536).

    Elements are counted in the order (C, H, W); key: two 32-bit numbers; samples (B * 16,) int64:
    the sample number of each image. Of the gradient too: that of x is `dropout` of that of y.
    """
    y, lanes = np.empty_like(x), x.shape[-1]
    for b, (block, out) in enumerate(zip(x, y, strict=True)):
        rows = block.reshape(-1, lanes)
        drawn = chances(len(rows), samples[b * lanes : (b + 1) * lanes], epoch, key)
        kept = np.where(drawn >= threshold, rows * x.dtype.type(scale), 0)
        out[...] = kept.reshape(block.shape)
    return y
