"""Batch normalization."""

import numpy as np

from mpidl import backends
from mpidl.ops import check
from mpidl.tape import op


@op(blocks=True)
def batchnorm(x, gamma, beta, *, epsilon=1e-5, scope="global", record=None):
    """Normalize by the statistics of the mini-batch: y = gamma * (x - mean) * rstd + beta.

    x: (N, C, H, W) or (N, C); gamma, beta: (C,); rstd = 1 / sqrt(variance + epsilon), the variance
    divided by the count (biased). Ioffe and Szegedy, "Batch normalization", 2015, algorithm 1.
    scope "global": statistics of the whole mini-batch over all ranks, forward and backward;
    "local": each rank normalizes by those of its own share, so that the result depends on the
    number of ranks. `record(mean, variance)` is called with the statistics of the whole mini-batch
    (float64) either way, for the running state.
    """
    check.images("batchnorm", x)
    channels = x.shape[1]
    if gamma.shape != (channels,) or beta.shape != (channels,):
        raise ValueError(
            f"batchnorm: expected gamma and beta ({channels},) for x {x.shape}, got {gamma.shape} "
            f"and {beta.shape}"
        )
    if scope not in ("global", "local"):
        raise ValueError(f"batchnorm: scope must be 'global' or 'local', got {scope!r}")
    backend, batch = backends.of(x), x.batch
    counts = batch.counts()
    moments = backend.moments(x.lanes, counts, batch.tree)
    local = moments.local() if scope == "local" else None
    whole = batch.world.gplus(moments)
    if record:
        record(whole[1 : 1 + channels], whole[1 + channels :] / whole[0])
    used = whole if local is None else local
    count, mean = max(used[0], 1), used[1 : 1 + channels]
    rstd = 1 / np.sqrt(used[1 + channels :] / count + epsilon)
    y = backend.batchnorm(x.lanes, mean, gamma * rstd, beta)

    def vjp(dy, needs):
        sums = backend.batchnorm_sums(dy.lanes, x.lanes, mean, batch.tree)
        if scope == "global":
            sums = batch.world.gplus(sums)
            total = np.concatenate([sums[:channels], sums[channels:] * rstd])
        else:
            sums = sums.local()
            total = batch.world.gplus(np.concatenate([sums[:channels], sums[channels:] * rstd]))
        a = gamma * rstd
        b = -a * rstd * rstd * sums[channels:] / count
        c = -a * sums[:channels] / count
        dx = backend.batchnorm_dx(dy.lanes, x.lanes, mean, a, b, c, counts) if needs[0] else None
        # total went over all ranks: these two are replicated, not Partials
        dgamma, dbeta = total[channels:].astype(gamma.dtype), total[:channels].astype(beta.dtype)
        return (None if dx is None else x.like(dx), dgamma, dbeta)

    return x.like(y), vjp


@op(blocks=True)
def batchnorm_predict(x, mean, variance, gamma, beta, *, epsilon=1e-5):
    """Normalize by the running state instead: what prediction does.

    x: (N, C, H, W) or (N, C); mean, variance, gamma, beta: (C,).
    """
    check.images("batchnorm_predict", x)
    backend = backends.of(x)
    rstd = 1 / np.sqrt(variance.astype(np.float64) + epsilon)
    y = backend.batchnorm(x.lanes, mean, gamma * rstd, beta)

    def vjp(dy, needs):
        raise TypeError("batchnorm_predict is not differentiated: train with batchnorm")

    return x.like(y), vjp
