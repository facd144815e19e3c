"""Determine which outputs each layer of a network reads.

A layer reads only outputs of earlier layers, so layers are computed in the order of the list.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from mpidl.nn.layers import Layer
from mpidl.text import did_you_mean

IMAGES = "images"  # the name of the network's input


def edges(layers: Sequence[Layer]) -> list[tuple[str, ...]]:
    """Return, for each layer, the names of the outputs that it reads.

    A layer that names no input reads the output of the layer before it. The first layer reads the
    images by default. Raises ValueError if a layer reads an unknown name, its own output or the
    output of a later layer, or if no layer reads the output of a layer before the last one.
    """
    names = [layer.name for layer in layers]
    positions = {name: i for i, name in enumerate(names)}
    reads_of_layers: list[tuple[str, ...]] = []
    for i, layer in enumerate(layers):
        reads = input_names(layer)
        if reads is None:
            before = names[i - 1] if i else IMAGES
            reads = (before if layer.after is None else layer.after,)
        elif layer.after is not None:
            raise ValueError(f"{layer.name}: a layer with `inputs` cannot also have `after`")
        for name in reads:
            if name != IMAGES and positions.get(name, i) >= i:
                _refuse(layer.name, name, names[:i], names)
        reads_of_layers.append(reads)
    read_names = {name for reads in reads_of_layers for name in reads}
    for name in names[:-1]:
        if name not in read_names:
            raise ValueError(
                f"{name}: no layer reads its output, but only the output of the last layer may be "
                "unread"
            )
    return reads_of_layers


def input_names(layer: Layer) -> tuple[str, ...] | None:
    """Return the names in `inputs` of a layer with several inputs, or None for other layers."""
    inputs = getattr(layer, "inputs", None)
    if inputs is None:
        return None
    if not isinstance(inputs, list | tuple) or len(inputs) < 2:
        raise ValueError(f"{layer.name}: expected the names of two or more inputs, got {inputs!r}")
    return tuple(inputs)


def rename_inputs(layer: Layer, new_names: Mapping[str, str]) -> Layer:
    """Return a copy of a layer that reads other names, given {old name: new name}."""
    renamed: Any = copy.copy(layer)
    if layer.after is not None:
        renamed.after = new_names.get(layer.after, layer.after)
    inputs = input_names(layer)
    if inputs is not None:
        renamed.inputs = tuple(new_names.get(name, name) for name in inputs)
    return renamed


def _refuse(reader, name, before, names):
    """Raise ValueError, because the layer `reader` reads `name`, which is not an earlier layer."""
    if name == reader:
        raise ValueError(f"{reader}: it cannot read its own output")
    if name in names:
        raise ValueError(f"{reader}: reads {name}, which comes later in the list of layers")
    hint = did_you_mean(name, [IMAGES, *before])
    raise ValueError(f"{reader}: reads {name!r}, and no layer has that name{hint}")


def last_readers(
    reads: Sequence[tuple[str, ...]], runs: Sequence[tuple[int, ...]]
) -> list[list[str]]:
    """Return, for each run, the names of the outputs that no later run reads.

    A run is a tuple with the indices of layers that are computed as one op.
    """
    last: dict[str, int] = {}
    for position, run in enumerate(runs):
        for i in run:
            for name in reads[i]:
                last[name] = position
    names: list[list[str]] = [[] for _ in runs]
    for name, position in last.items():
        names[position].append(name)
    return names
