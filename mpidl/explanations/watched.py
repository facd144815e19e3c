"""Watch the output of a layer, to differentiate scores with respect to it."""

from __future__ import annotations

import copy
from typing import Any

from mpidl.core.tape import Var, value_of
from mpidl.errors import UserError
from mpidl.explanations.class_scores import score_layer
from mpidl.nn import Network, graph
from mpidl.nn.layers import Layer, LayerContext
from mpidl.nn.layers.base import Value

WATCH = "watched output"  # name of the layer that `watch` inserts


class Watch(Layer):
    """A layer that returns its input as a leaf of the tape, from which differentiation starts.

    The layers before it are not differentiated. All layers after it are, whatever else they read.
    """

    leaf: Any  # a Var, after `forward`

    def forward(self, x: Any, context: LayerContext) -> Value:
        self.leaf = Var(value_of(x).stored(), name=self.name)
        return self.leaf


def watch(net: Network, name: str) -> Network:
    """Return a copy of a network in which a `Watch` follows the layer `name`.

    The layers that read the output of this layer read it from the `Watch`.
    """
    place, part = net.layer_number(name) + 1, copy.copy(net)
    layers: list[Any] = [graph.rename_inputs(layer, {name: WATCH}) for layer in net.layers]
    part.layers = [*layers[:place], Watch(name=WATCH, after=name), *layers[place:]]
    reads = [tuple(WATCH if read == name else read for read in reads) for reads in net.reads]
    part.reads = [*reads[:place], (name,), *reads[place:]]
    shapes = net.output_shapes
    part.output_shapes = [*shapes[:place], shapes[place - 1], *shapes[place:]]
    part.plan_runs()
    return part


def chosen_layer(net: Network, name: str | None) -> str:
    """Return the layer to watch: `name`, or the last one with a spatial output before the scores.

    Raises UserError if the layer is unknown, comes after the scores or has no spatial output.
    """
    scores = net.up_to(score_layer(net)).layer_names
    shapes = dict(zip(net.layer_names, net.output_shapes, strict=True))
    if name is None:
        for candidate in reversed(scores[:-1]):
            if len(shapes[candidate]) == 3 and shapes[candidate][1:] != (1, 1):
                return candidate
        raise UserError(
            "grad-cam: expected a network with a layer before the scores whose output has rows and "
            "columns, found none: use occlusion, gradient or integrated-gradients"
        )
    try:
        net.layer_number(name)
    except KeyError as error:
        raise UserError(f"layer: {error.args[0]}") from None
    if name not in scores:
        raise UserError(
            f"layer {name}: expected a layer before the scores, which it does not enter"
        )
    if len(shapes[name]) != 3:
        raise UserError(
            f"layer {name}: expected an output (C, H, W), found one of shape {shapes[name]}"
        )
    return name
