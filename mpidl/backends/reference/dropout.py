"""Compute dropout in NumPy, with random numbers from Philox4x32-10."""

import numpy as np

CHANCES = 1 << 16  # random integers are from 0 to CHANCES - 1
GROUP = 8  # number of elements per call of the generator
ROUNDS = 10  # rounds of Philox


def philox(counter, key):
    """Compute four arrays of random 32-bit words with Philox4x32-10.

    Parameters
    ----------
    counter, key : sequences of four and of two uint64 arrays or integers
        32-bit words. Arrays must broadcast against each other.

    Notes
    -----
    See Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
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
    """Return random integers from 0 to 65535, in the shape (elements, len(samples)).

    Each integer depends only on (key, epoch, sample, element). Eight consecutive elements of a
    sample share one call of Philox4x32-10. The counter of the call is (element // 8, low 32 bits of
    the sample, high 32 bits of the sample, epoch). Element e uses 16 bits of word e // 2 % 4: bits
    0-15 if e is even, bits 16-31 if e is odd.
    """
    samples = np.asarray(samples, np.int64).astype(np.uint64)
    groups = np.arange(-(-elements // GROUP), dtype=np.uint64)[:, None]
    half = np.uint64(32)
    words = philox((groups, samples & np.uint64(0xFFFFFFFF), samples >> half, epoch), key)
    words = [np.broadcast_to(word, (len(groups), len(samples))) for word in words]
    halves = [part for word in words for part in (word & np.uint64(0xFFFF), word >> np.uint64(16))]
    return np.stack(halves, axis=1).reshape(-1, len(samples))[:elements]


def dropout(x, threshold, scale, key, epoch, samples, whole_images):
    y, lanes = np.empty_like(x), x.shape[-1]
    for b, (block, out) in enumerate(zip(x, y, strict=True)):
        rows = block.reshape(-1, lanes)
        count = 1 if whole_images else len(rows)
        drawn = chances(count, samples[b * lanes : (b + 1) * lanes], epoch, key)
        values = np.where(drawn >= threshold, rows * x.dtype.type(scale), 0)
        out[...] = values.reshape(block.shape)
    return y
