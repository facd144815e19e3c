"""Fuse neighbouring layers into one op. This is a peephole optimization of the list of layers.

Convolution, batch normalization and ReLU become one op, which stores only the convolution's output.
Later ops (convolution, pooling, dense) apply the normalization and the ReLU when they read that
output. The three layers must be neighbours in the list, and no other layer may read the outputs of
the first two. Several layers may read the output of the op; the cotangents from these layers are
summed. Fusion changes neither the network nor the learnables nor the results.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from mpidl import backends, ops
from mpidl.nn.layers import BatchNorm, Conv2D, Layer, LayerContext, ReLU
from mpidl.nn.layers.base import Value


def find_runs(layers: Sequence[Layer], reads: Sequence[tuple[str, ...]]) -> list[tuple[int, ...]]:
    """Group the indices of the layers into runs. The layers of a run are computed as one op.

    Parameters
    ----------
    layers
        The layers of the network.
    reads
        The names that each layer reads.
    """
    readers = collections.Counter(name for names in reads for name in names)
    runs, i = [], 0
    while i < len(layers):
        three = layers[i : i + 3]
        types = tuple(type(layer) for layer in three)
        fusible = types == (Conv2D, BatchNorm, ReLU) and all(
            reads[i + j + 1] == (three[j].name,) and readers[three[j].name] == 1 for j in (0, 1)
        )
        count = 3 if fusible else 1
        runs.append(tuple(range(i, i + count)))
        i += count
    return runs


def can_fuse(x: Any) -> bool:
    """Return whether the backend of `x` supports the fused ops."""
    return backends.of_value(x).fuses_convolutions


def forward(run: Sequence[Layer], x: Any, contexts: Sequence[LayerContext]) -> Value:
    """Apply a run of convolution, batch normalization and ReLU to x by one op."""
    conv: Any
    norm: Any
    conv, norm, _ = run
    context, norm_context, _ = contexts
    options = {
        "stride": conv.stride,
        "padding": conv.padding,
        "dilation": conv.dilation,
        "groups": conv.groups,
        "epsilon": norm.epsilon,
    }
    weight, bias = context["weight"], conv.bias_of(context)
    gamma, beta = norm_context["gamma"], norm_context["beta"]
    if not norm_context.training:
        mean, variance = norm.running(norm_context)
        return ops.conv2d_batchnorm_relu_predict(
            x, weight, bias, mean, variance, gamma, beta, **options
        )
    return ops.conv2d_batchnorm_relu(
        x,
        weight,
        bias,
        gamma,
        beta,
        scope=context.batchnorm,
        record=norm.recorder(norm_context),
        **options,
    )
