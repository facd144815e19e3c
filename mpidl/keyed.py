"""Random numbers by key, never by stream.

A number depends on (seed, purpose, epoch, sample, element) alone, so it is the same whoever asks
for it, in whatever order: any rank, any thread, before or after a resume. The generator is
Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the key is
drawn from (seed, purpose), the counter holds (element, sample, epoch, 0).
"""

import hashlib

import numpy as np


def words(seed, purpose, count, *, epoch=0, sample=0):
    """`count` uniform 64-bit words for this key; purpose is a text such as "shuffle" or a layer."""
    counter = np.array([0, sample, epoch, 0], np.uint64)
    return np.random.Philox(counter=counter, key=key_of(seed, purpose)).random_raw(count)


def key_of(seed, purpose):
    """The two 64-bit words of a generator's key."""
    digest = hashlib.sha256(f"{int(seed)}\0{purpose}".encode()).digest()
    return np.frombuffer(digest[:16], "<u8").astype(np.uint64)


def uniform(seed, purpose, count, *, epoch=0, sample=0):
    """`count` float64 numbers in [0, 1), each a multiple of 2**-53."""
    return (words(seed, purpose, count, epoch=epoch, sample=sample) >> 11) * 2.0**-53


def permutation(n, seed, purpose, *, epoch=0):
    """A permutation of range(n): the stable argsort of n words.

    Not `Generator.permutation`, whose result may change from one NumPy version to the next.
    """
    return np.argsort(words(seed, purpose, n, epoch=epoch), kind="stable")
