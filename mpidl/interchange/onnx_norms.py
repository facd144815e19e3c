"""Convert ONNX operators for normalization within an image: layer, group and instance norms."""

from __future__ import annotations

import numpy as np

from mpidl.interchange.onnx_builder import operator
from mpidl.interchange.onnx_values import Unsupported
from mpidl.nn import layers as nn


def _factors(node):
    """Return gamma and beta, the inputs 1 and 2."""
    gamma = node.constant(1)
    return gamma, np.zeros_like(gamma) if node.input(2) is None else node.constant(2)


@operator("LayerNormalization")
def _layer_norm(node, builder):
    if any(node.proto.output[1:]):
        raise Unsupported("it also computes the statistics")
    node.require(stash_type=1)
    x, (gamma, beta) = node.value(any_order=True), _factors(node)
    count = len(x.full_shape(1))
    axes = sorted(x.axes(range(node.get("axis", -1) % count, count)))
    if axes not in ([0], list(range(len(x.shape)))):
        raise Unsupported(f"it normalizes the axes {axes} of {x.shape}, expected 0 or all")
    layer = nn.LayerNorm("channels" if axes == [0] else "image", epsilon=node.get("epsilon", 1e-5))
    if x.image or len(axes) > 1:
        gamma, beta = x.to_layer(gamma), x.to_layer(beta)
    return builder.add(node, layer, [x], gamma=gamma, beta=beta)


@operator("GroupNormalization")
def _group_norm(node, builder):
    node.require(stash_type=1)
    x, groups = node.value(), node["num_groups"]
    gamma, beta = _factors(node)  # onnx refuses the operator of opsets 18 to 20
    layer = nn.GroupNorm(groups, epsilon=node.get("epsilon", 1e-5))
    return builder.add(node, layer, [x], gamma=gamma, beta=beta)


@operator("InstanceNormalization")
def _instance_norm(node, builder):
    """Add instance normalization or, if the channels are reshaped to groups, group normalization.

    PyTorch writes group normalization in this way. A scale and an offset that follow become gamma
    and beta of the layer (`Builder.affine`).
    """
    x, (gamma, beta) = node.value(any_groups=True), _factors(node)
    layer = nn.InstanceNorm(epsilon=node.get("epsilon", 1e-5))
    if x.groups:
        layer = nn.GroupNorm(x.groups[0], epsilon=layer.epsilon)
        gamma, beta = (np.repeat(v, x.shape[0] // x.groups[0]) for v in (gamma, beta))
    return builder.add(node, layer, [x], gamma=gamma, beta=beta)
