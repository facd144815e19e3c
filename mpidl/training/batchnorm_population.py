"""Compute the batch-normalization statistics of a trained network over the training set."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from mpidl import backends
from mpidl.core.fold import merge_moments
from mpidl.data import MinibatchQueue
from mpidl.data.agreement import agreed
from mpidl.nn import BatchNorm, Network
from mpidl.training.batchnorm_moving import trainable_norms


def population_state(
    net: Network,
    queue: MinibatchQueue,
    world: Any,
    signals: Any = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, np.ndarray] | None:
    """Return the network's state with statistics over the whole training set. Collective.

    These population statistics replace the moving means and variances. One pass over the queue
    computes the statistics. In this pass, batch normalization runs as in training, and all other
    layers run as in prediction (without dropout). The moments (count, mean, sum of squared
    deviations) of the mini-batches are merged in order in float64. Frozen layers keep their state.

    Parameters
    ----------
    net : Network
        The trained network.
    queue : MinibatchQueue
        The queue that delivers the training set.
    world : World
        The ranks that share the mini-batches.
    signals : Signals, optional
        Signals that the process has received. A signal on any rank ends the pass.
    progress : function, optional
        Function to call after each mini-batch, with the number of images processed so far.

    Returns
    -------
    dict or None
        The new state, or None if a signal ended the pass.
    """
    norms = trainable_norms(net)
    if not norms:
        return net.state
    keys = [(f"{layer.name}.mean", f"{layer.name}.variance") for layer in norms]
    measuring = _measuring_copy(net)
    blank = {name: _blank(net.state[name]) for pair in keys for name in pair}
    totals: list[np.ndarray] = []
    image_count = 0
    for images, _ in agreed(queue.epoch(0), world, signals):
        measuring.state = {**net.state, **blank}
        measuring(images)
        count = images.batch.count
        image_count += count
        if progress is not None:
            progress(image_count)
        del images  # let the next mini-batch reuse the memory
        moments = [
            np.concatenate([[count], mean, count * variance])
            for mean, variance in (
                [np.asarray(measuring.state[name], np.float64) for name in pair] for pair in keys
            )
        ]
        merged = [merge_moments(*pair) for pair in zip(totals, moments, strict=bool(totals))]
        totals = merged or moments
    if signals is not None and signals.agreed:
        return None
    state = {name: np.asarray(a) for name, a in net.state.items()}
    for (mean, variance), total in zip(keys, totals, strict=True):
        channels = len(total) // 2
        state[mean] = total[1 : 1 + channels].astype(np.float32)
        state[variance] = (total[1 + channels :] / total[0]).astype(np.float32)
    return state


def _measuring_copy(net):
    """Return a copy of the network that stores the statistics of each mini-batch in its state."""
    layers = []
    for layer in net.layers:
        layer = copy.copy(layer)
        if not isinstance(layer, BatchNorm):
            layer.trainable = False
        elif layer.trainable:
            layer.decay = 1.0
        layers.append(layer)
    return net.bind({}).with_layers(layers)


def _blank(array):
    """Return zeros with the shape and device of `array`, as float64 on the host."""
    if isinstance(array, np.ndarray):
        return np.zeros(array.shape)
    return backends.of_array(array).zeros_like(array)
