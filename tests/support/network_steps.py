"""Compute a training step and the bytes of its results, for the tests of `mpidl.nn`."""

import numpy as np
from single_rank import SingleRank

import mpidl as dl


def conv_norm_relu(size, filters, **options):
    """Return three layers that run as one op."""
    return dl.Conv2D(size, filters, **options), dl.BatchNorm(), dl.ReLU()


def model_loss(net, images, labels):
    return dl.softmax_cross_entropy(net(images), labels)


def step(ranks, net, batch, loss=model_loss):
    """Return the loss, gradients and state for a mini-batch, summed over the ranks."""
    if not isinstance(ranks, SingleRank):
        return dl.value_and_grad(loss, reduce=ranks)(net, *batch)
    result, gradients, *state = dl.value_and_grad(loss)(net, *batch)
    return ranks.gplus(result), ranks.gplus(gradients), *state


def step_bytes(ranks, net, batch, loss=model_loss):
    return bytes_of(step(ranks, net, batch, loss))


def bytes_of(step_results):
    """Return the bytes of the results of `step`."""
    result, *tables = step_results
    losses = result if isinstance(result, tuple) else (result,)
    return [np.asarray(value).tobytes() for value in losses], *map(table_bytes, tables)


def table_bytes(table):
    return {name: np.asarray(array).tobytes() for name, array in table.items()}


def fused_and_separate(make_network):
    """Return two equal networks: one that fuses layers, and one that runs layers separately."""
    networks = make_network(), make_network()
    networks[1].fuse = False
    return networks


def in_float64(net):
    """Convert a network's learnables and state to float64 and return the network."""
    net.parameters = {name: array.astype(np.float64) for name, array in net.parameters.items()}
    net.state = {name: array.astype(np.float64) for name, array in net.state.items()}
    return net
