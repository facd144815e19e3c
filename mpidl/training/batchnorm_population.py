"""Statistics of batch normalization over the whole training set, for the trained network."""

import copy

import numpy as np

from mpidl import backends
from mpidl.evaluation.evaluate import agreed
from mpidl.fold import merge_moments
from mpidl.nn import BatchNorm


def population(net, queue, world, signals=None):
    """The network's state with the mean and variance of all images in place of the moving ones.

    One pass over the queue in which batch normalization runs as in training and all else as in
    prediction (no dropout); the mini-batches' (count, mean, M2) are merged in order, in float64.
    Layers that are frozen keep their state. None where a signal ended it. Collective.
    """
    norms = [layer for layer in net.layers if isinstance(layer, BatchNorm) and layer.trainable]
    if not norms:
        return net.state
    keys = [(f"{layer.name}.mean", f"{layer.name}.variance") for layer in norms]
    measuring = _measuring(net)
    blank = {name: _blank(net.state[name]) for pair in keys for name in pair}
    totals = None
    for images, _ in agreed(queue.epoch(0), world, signals):
        measuring.state = {**net.state, **blank}
        measuring(images)
        count = images.batch.count
        del images  # the next one may take its memory
        found = [
            np.concatenate([[count], mean, count * variance])
            for mean, variance in (
                [np.asarray(measuring.state[name], np.float64) for name in pair] for pair in keys
            )
        ]
        if totals is None:
            totals = found
        else:
            totals = [merge_moments(*two) for two in zip(totals, found, strict=True)]
    if signals is not None and signals.agreed:
        return None
    state = {name: np.asarray(a) for name, a in net.state.items()}
    for (mean, variance), total in zip(keys, totals, strict=True):
        channels = len(total) // 2
        state[mean] = total[1 : 1 + channels].astype(np.float32)
        state[variance] = (total[1 + channels :] / total[0]).astype(np.float32)
    return state


def _measuring(net):
    """A copy whose state, after a call, is the statistics of that call's mini-batch."""
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
    """Zeros where the running state lies; in float64 on the host, to lose no digit."""
    if isinstance(array, np.ndarray):
        return np.zeros(array.shape)
    return backends.of_array(array).zeros_like(array)
