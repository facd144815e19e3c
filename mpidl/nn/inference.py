"""Prepare networks for prediction: normalizations and scales join the preceding layer."""

from __future__ import annotations

import collections
import copy
from typing import Any

import numpy as np

from mpidl.nn import graph
from mpidl.nn.construction import layer_of
from mpidl.nn.layers import BatchNorm, Conv2D, Dense, Layer, Scale, TransposedConv2D
from mpidl.nn.network import Network

# {type of a layer that can include a batch normalization: axis of the outputs in its weight}.
OUTPUT_AXIS: dict[type[Layer], int] = {Conv2D: 0, Dense: 0, TransposedConv2D: 1}


def fold_batchnorm(net: Network) -> Network:
    """Return a network for prediction whose weights include the batch normalizations.

    A batch normalization with running statistics multiplies each channel by a number and adds
    another number. These numbers can be included in the weight and bias of a convolution or dense
    layer that directly precedes it, if no other layer reads its output. The same holds for the
    factors of a Scale layer. The scores change only by
    rounding. The copy shares unchanged arrays with `net`, which is returned itself if no batch
    normalization can be included or if it is on a GPU.
    """
    readers = collections.Counter(name for names in net.reads for name in names)
    norms = [
        i
        for i, (layer, before) in enumerate(zip(net.layers[1:], net.layers, strict=False), 1)
        if type(layer) in (BatchNorm, Scale)
        and type(before) in OUTPUT_AXIS
        and net.reads[i] == (before.name,)
        and readers[before.name] == 1
    ]
    if not norms or net.on_device:
        return net
    folded = copy.copy(net)
    folded.training = False
    new_names = {net.layers[i].name: net.layers[i - 1].name for i in norms}
    layers: list[Any] = [graph.rename_inputs(layer, new_names) for layer in net.layers]
    parameters = dict(net.parameters)
    for i in norms:
        conv, norm = layers[i - 1], net.layers[i]
        conv.bias = True
        weight, bias = _folded_arrays(net, conv, norm)
        parameters |= {f"{conv.name}.weight": weight, f"{conv.name}.bias": bias}
    remaining = [i for i in range(len(layers)) if i not in set(norms)]
    folded.layers = [layers[i] for i in remaining]
    folded.reads = [tuple(new_names.get(name, name) for name in net.reads[i]) for i in remaining]
    folded.output_shapes = [net.output_shapes[i] for i in remaining]
    folded._parameters = {k: v for k, v in parameters.items() if layer_of(k) not in new_names}
    folded._state = {k: v for k, v in net.state.items() if layer_of(k) not in new_names}
    folded.plan_runs()
    return folded


def _folded_arrays(net, layer, norm):
    """Return a weight and a bias of `layer` that include the layer `norm` after it."""
    if isinstance(norm, Scale):
        scale = net.parameters[f"{norm.name}.scale"].astype(np.float64)
        beta, mean = np.float32(0), np.float32(0)
    else:
        gamma, beta = (net.parameters[f"{norm.name}.{name}"] for name in ("gamma", "beta"))
        mean, variance = (net.state[f"{norm.name}.{name}"] for name in ("mean", "variance"))
        scale = gamma / np.sqrt(variance.astype(np.float64) + norm.epsilon)
    weight = net.parameters[f"{layer.name}.weight"]
    bias = net.parameters.get(f"{layer.name}.bias", np.float32(0))
    shape = [1] * weight.ndim
    shape[OUTPUT_AXIS[type(layer)]] = -1
    dtype = weight.dtype
    return (weight * scale.reshape(shape)).astype(dtype), (beta + (bias - mean) * scale).astype(
        dtype
    )
