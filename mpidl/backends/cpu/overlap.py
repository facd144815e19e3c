"""Compute losses of the overlap of regions with the C kernels."""

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import sizes
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import partial_of_rows, tree_of
from mpidl.backends.training_interface import DICE


def overlap(p, labels, counts, tree, rule=DICE):
    rows = arenas.empty((len(p),), np.float64)
    slopes = arenas.empty((len(p), 2, p.shape[1], p.shape[-1]), np.float64)
    arrays = np.ascontiguousarray(p), np.ascontiguousarray(labels, np.int32), counts, slopes, rows
    kernels().overlap(*arrays, *sizes(p), tree_of(tree), *rule)
    return partial_of_rows(rows, tree), slopes


def overlap_dp(p, labels, slopes, scale, counts, rule=DICE):
    d = arenas.empty(p.shape)
    arrays = np.ascontiguousarray(p), np.ascontiguousarray(labels, np.int32), counts, slopes
    kernels().overlap_dp(*arrays, scale, d, *sizes(p), rule.is_squared)
    return d
