"""Remove the initial values from the moving statistics of batch normalization.

After few iterations, the moving statistics still contain a large part of their initial values. A
validation during training therefore evaluates averages over the mini-batches of the run alone, as
Adam does with its moments. The stored statistics do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpidl.nn import BatchNorm, Network
from mpidl.training.optimizers.adam import power

NEGLIGIBLE = 2.0**-30  # share of the initial values that no longer changes a float32 number


def trainable_norms(net: Network) -> list[BatchNorm]:
    """Return the batch-normalization layers whose statistics change during training."""
    return [layer for layer in net.layers if isinstance(layer, BatchNorm) and layer.trainable]


def _statistics(net: Network, updates: int) -> Iterator[tuple[str, float]]:
    """Yield (name, share) of statistics that contain a relevant share of their initial values."""
    for layer in trainable_norms(net):
        share = power(1 - layer.decay, updates)
        if share > NEGLIGIBLE:
            yield from ((f"{layer.name}.{kind}", share) for kind in ("mean", "variance"))


def relevant(
    net: Network, initial: Mapping[str, np.ndarray], updates: int
) -> dict[str, np.ndarray]:
    """Return the initial values that `debiased` still needs, for a checkpoint."""
    return {name: initial[name] for name, _ in _statistics(net, updates) if name in initial}


def debiased(net: Network, initial: Mapping[str, np.ndarray], updates: int) -> dict[str, Any]:
    """Return the state of a network with moving statistics over the mini-batches of the run alone.

    After n updates, a statistic is s * initial + (1 - s) * average, where s = (1 - decay)**n. The
    result contains the average.

    Parameters
    ----------
    net : Network
        The network being trained, in host memory.
    initial : mapping
        {name: array} of the state before the first iteration. Statistics that are missing stay as
        they are.
    updates : int
        Number of updates of the statistics so far.

    Returns
    -------
    dict
        The state: float32 arrays by name.
    """
    state = dict(net.state)
    for name, share in _statistics(net, updates):
        if name not in initial or share == 1:  # 1: there is no mini-batch yet
            continue
        moving, start = (np.asarray(a, np.float64) for a in (net.state[name], initial[name]))
        average = (moving - share * start) / (1 - share)
        if name.endswith(".variance"):
            average = np.maximum(average, 0.0)  # rounding may give a small negative number
        state[name] = average.astype(np.float32)
    return state
