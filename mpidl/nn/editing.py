"""Edit networks: freeze, replace or append layers, or cut a network after a layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.nn import construction, graph
from mpidl.nn.layers import Layer

if TYPE_CHECKING:
    from mpidl.nn.network import Network


def set_layers(net: Network, layers: list[Any]) -> Network:
    """Replace all layers by layers with the same names and inputs, and return the network."""
    net.layers = layers
    net.plan_runs()
    return net


def set_trainable(net: Network, names: Sequence[str], trainable: bool) -> Network:
    """Freeze or unfreeze layers, and return the network; see `Network.freeze`."""
    layers = list(net.layers)
    for i in map(net.layer_number, names):
        layers[i] = copy.copy(layers[i])
        layers[i].trainable = trainable
    return set_layers(net, layers)


def replace_layers(net: Network, replacements: Mapping[str, Layer], seed: int | None) -> Network:
    """Return a network with some layers replaced; see `Network.replace_layers`."""
    layers: list[Any] = list(net.layers)
    new_names = {}
    for name, layer in replacements.items():
        i = net.layer_number(name)
        if not isinstance(layer, Layer):
            raise TypeError(f"replace_layers: expected one layer for {name}, got {layer!r}")
        layers[i], old_layer = copy.copy(layer), layers[i]
        layers[i].name = layer.name or name
        new_names[name] = layers[i].name
        if getattr(layer, "inputs", None) == () and graph.input_names(old_layer):
            layers[i].inputs = old_layer.inputs
        elif layers[i].after is None and graph.input_names(layers[i]) is None:
            layers[i].after = old_layer.after
    layers = [graph.rename_inputs(layer, new_names) for layer in layers]
    seed = net.seed if seed is None else seed
    edited = type(net)(layers, net.input_shape, seed=seed, batchnorm=net.batchnorm)
    whitening = edited.unwhitened  # before the kept weights replace the new initial weights
    _copy_settings(net, edited)
    if edited.output_shape[:1] != net.output_shape[:1]:
        edited.classes = edited.loss = None
    for new, old in ((edited._parameters, net._parameters), (edited._state, net._state)):
        for name in (name for name in old if construction.layer_of(name) not in replacements):
            if new[name].shape != old[name].shape:
                raise ValueError(
                    f"replace_layers: {name} has shape {old[name].shape}, but needs "
                    f"{new[name].shape} after the new layers: replace its layer too"
                )
            new[name] = np.array(old[name])
    layer_names = {*net.unwhitened, *new_names.values()}
    edited.unwhitened = [name for name in whitening if name in layer_names]
    return edited


def _copy_settings(net, edited):
    names = "fuse normalization crop preprocess input_function trained_precision classes loss"
    for name in [*names.split(), "numerics", "mpidl_version"]:
        setattr(edited, name, getattr(net, name))


def append_layer(net: Network, layer: Layer) -> Network:
    """Return a network with one more layer, which has no learnables; see `Network.append_layer`."""
    edited = type(net)(
        [*net.layers, layer], net.input_shape, seed=net.seed, batchnorm=net.batchnorm
    )
    _copy_settings(net, edited)
    edited.parameters, edited.state = net.parameters, net.state
    edited.unwhitened = net.unwhitened
    return edited


def with_input_shape(net: Network, shape: Sequence[int]) -> Network:
    """Return a network of the same layers for images of another shape, which shares the arrays.

    Raises ValueError if a layer cannot read such images, or would need arrays of other shapes.
    """
    edited = type(net)(net.layers, shape, seed=None, batchnorm=net.batchnorm)
    for new, old in ((edited._parameters, net._parameters), (edited._state, net._state)):
        for name, array in old.items():
            if new[name].shape != array.shape:
                raise ValueError(f"{name} has shape {array.shape}, but needs {new[name].shape}")
    _copy_settings(net, edited)
    edited.crop = None
    edited.parameters, edited.state = net.parameters, net.state
    edited.unwhitened = net.unwhitened
    return edited


def up_to(net: Network, name: str) -> Network:
    """Return the part of a network that computes a layer's output; see `Network.up_to`."""
    last, part = net.layer_number(name), copy.copy(net)
    ancestors = {name}
    if last < len(net.layers) - 1:
        part.classes = part.loss = None
    for i in range(last, -1, -1):
        if net.layers[i].name in ancestors:
            ancestors.update(net.reads[i])
    numbers = [i for i, layer in enumerate(net.layers) if layer.name in ancestors]
    part.layers = [copy.copy(net.layers[i]) for i in numbers]
    for i, layer in zip(numbers, part.layers, strict=True):
        if layer.after is None and graph.input_names(layer) is None:
            (layer.after,) = net.reads[i]  # the previous layer may not be in the new list
    part.reads = [net.reads[i] for i in numbers]
    part.output_shapes = [net.output_shapes[i] for i in numbers]
    for table in ("_parameters", "_state"):
        arrays = getattr(net, table).items()
        setattr(
            part, table, {key: a for key, a in arrays if construction.layer_of(key) in ancestors}
        )
    part.unwhitened = [name for name in net.unwhitened if name in ancestors]
    part.plan_runs()
    return part
