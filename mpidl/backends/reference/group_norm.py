"""Compute normalization within an image, and its gradient, in NumPy. Sums are in float64."""

import math
from typing import Any

import numpy as np

from mpidl.core.fold import Counter


def _sets_of(block, groups):
    """Reshape a block (C, ..., 16) to (sets of channels, numbers, sets of pixels, 16)."""
    channels, *_, lanes = block.shape
    if groups is None:
        return block.reshape(1, channels, -1, lanes)
    return block.reshape(groups, -1, 1, lanes)


def _mean(sets):
    return sets.mean(axis=1, keepdims=True, dtype=np.float64)


def _factors(vector, block, otherwise):
    """Return gamma or beta with axes for a block (C, ..., 16)."""
    if vector is None:
        return block.dtype.type(otherwise)
    return vector.reshape(*vector.shape, *(1,) * (block.ndim - vector.ndim)).astype(block.dtype)


def _statistics(block, groups, epsilon):
    # the variance is the mean of squares of deviations from the rounded mean, corrected for it
    sets = _sets_of(block, groups)
    rounded = _mean(sets).astype(block.dtype)
    centred = sets - rounded
    error = _mean(centred)
    variance = np.maximum(_mean(np.square(centred)) - error * error, 0)
    return rounded + error, 1 / np.sqrt(variance + epsilon)


def _normalized(block, statistics, groups):
    mean, rstd = (v.astype(block.dtype) for v in statistics)
    return ((_sets_of(block, groups) - mean) * rstd).reshape(block.shape)


def group_norm(x, gamma, beta, groups, epsilon):
    statistics = [_statistics(block, groups, epsilon) for block in x]
    y = np.empty_like(x)
    for block, of_block, out in zip(x, statistics, y, strict=True):
        out[...] = _normalized(block, of_block, groups) * _factors(gamma, block, 1)
        out += _factors(beta, block, 0)
    return y, statistics


def group_norm_backward(dy, x, gamma, statistics, groups, tree, needs):
    shape = x.shape[1:2] if gamma is None else gamma.shape
    dx: Any = np.empty_like(x) if needs[0] else None
    counters = [Counter(tree), Counter(tree)]
    for i, (grad, block, of_block) in enumerate(zip(dy, x, statistics, strict=True)):
        normalized = _normalized(block, of_block, groups)
        if needs[0]:
            _dx(grad * _factors(gamma, block, 1), normalized, of_block[1], groups, dx[i])
        for counter, terms in zip(counters, (grad * normalized, grad), strict=True):
            of_factors = terms.reshape(math.prod(shape), -1)
            sums = of_factors.sum(axis=1, dtype=np.float64)
            counter.push(sums.astype(x.dtype))
    sums = (counter.partial(shape, x.dtype) for counter in counters)
    return dx, *(s if is_needed else None for s, is_needed in zip(sums, needs[1:], strict=True))


def _dx(dz, normalized, rstd, groups, dx):
    sets, scaled = _sets_of(dz, groups), _sets_of(normalized, groups)
    of_dz, of_products = (_mean(v).astype(dz.dtype) for v in (sets, sets * scaled))
    result = rstd.astype(dz.dtype) * (sets - of_dz - scaled * of_products)
    dx[...] = result.reshape(dx.shape)
