"""Compute random numbers from a key instead of drawing them from a stream.

A number is a function of (seed, purpose, epoch, sample, element), so every rank and thread gets the
same number, in any order, and in a resumed run. The generator is Philox4x64-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011). Its key is a hash of (seed, purpose), and
its counter is (element, sample, epoch, 0).
"""

import hashlib

import numpy as np
from numpy.random import Philox  # at its first use, `np.random` takes more system calls


def words(seed: int, purpose: str, count: int, *, epoch: int = 0, sample: int = 0) -> np.ndarray:
    """Return `count` uniformly distributed 64-bit words for a key.

    Parameters
    ----------
    seed, purpose, epoch, sample
        The key. `purpose` is what the numbers are for, such as "shuffle" or the name of a layer.
    count
        Number of words.

    Returns
    -------
    ndarray (count,) uint64
    """
    counter = np.array([0, sample, epoch, 0], np.uint64)
    return Philox(counter=counter, key=key_of(seed, purpose)).random_raw(count)


def key_of(seed: int, purpose: str) -> np.ndarray:
    """Return the Philox key of a seed and a purpose.

    Parameters
    ----------
    seed, purpose
        As for `words`.

    Returns
    -------
    ndarray (2,) uint64
    """
    digest = hashlib.sha256(f"{int(seed)}\0{purpose}".encode()).digest()
    return np.frombuffer(digest[:16], "<u8").astype(np.uint64)


def uniform(seed: int, purpose: str, count: int, *, epoch: int = 0, sample: int = 0) -> np.ndarray:
    """Return `count` numbers in [0, 1), each a multiple of 2**-53.

    Parameters
    ----------
    seed, purpose, count, epoch, sample
        As for `words`.

    Returns
    -------
    ndarray (count,) float64
    """
    return (words(seed, purpose, count, epoch=epoch, sample=sample) >> 11) * 2.0**-53


def permutation(n: int, seed: int, purpose: str, *, epoch: int = 0) -> np.ndarray:
    """Return a random permutation of range(n): the stable argsort of n random words.

    `Generator.permutation` is not used, because its result may change between versions of NumPy.

    Parameters
    ----------
    n
        Number of elements.
    seed, purpose, epoch
        As for `words`.

    Returns
    -------
    ndarray (n,) int64
    """
    return np.argsort(words(seed, purpose, n, epoch=epoch), kind="stable")
