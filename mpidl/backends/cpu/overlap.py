"""Compute the Dice loss with the C kernels."""

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import sizes
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import partial_of_rows, tree_of
from mpidl.backends.training_interface import PLAIN_DICE


def dice(p, labels, counts, tree, rule=PLAIN_DICE):
    rows = arenas.empty((len(p),), np.float64)
    slopes = arenas.empty((len(p), 2, p.shape[1], p.shape[-1]), np.float64)
    arrays = np.ascontiguousarray(p), np.ascontiguousarray(labels, np.int32), counts, slopes, rows
    kernels().dice(*arrays, *sizes(p), tree_of(tree), *rule)
    return partial_of_rows(rows, tree), slopes


def dice_dp(p, labels, slopes, scale, counts):
    d = arenas.empty(p.shape)
    arrays = np.ascontiguousarray(p), np.ascontiguousarray(labels, np.int32), counts, slopes
    kernels().dice_dp(*arrays, scale, d, *sizes(p))
    return d
