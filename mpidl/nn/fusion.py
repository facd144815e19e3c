"""Fuse neighbouring layers of a network into one op.

These runs of layers become one op:

- Convolution, batch normalization, and ReLU or clip. The op stores only the convolution's output.
  Later ops (convolution, pooling, resizing, dense) apply the normalization and the activation when
  they read that output.
- Convolution and batch normalization, if only layers of the types NORMALIZING read the result. The
  op stores only the convolution's output, which these layers normalize when they read it.
- The addition of two values and ReLU.
- Convolution and ReLU, optionally with the addition of another value between them, as at the end
  of a residual block. The op applies the addition and the ReLU before it stores the result.
- The concatenation of two values, a convolution with filters larger than 1x1, and ReLU. The
  concatenated value is not stored.
- Convolution, ReLU, cross-channel normalization and max pooling. The op stores the output of the
  ReLU and the pooled pixels, but not the normalized pixels.

Layers outside a run may read only the output of the run's last layer. If several layers read this
output, their cotangents are summed. Fusion does not change the network, the learnables or, in
float32, the results.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from mpidl import backends, ops
from mpidl.core.tape import value_of
from mpidl.nn.layers import (
    GELU,
    Add,
    BatchNorm,
    Clip,
    Concat,
    Conv2D,
    CrossChannelNorm,
    HardSigmoid,
    HardSwish,
    Layer,
    LayerContext,
    LeakyReLU,
    MaxPool2D,
    ReLU,
    Sigmoid,
    Swish,
    Tanh,
)
from mpidl.nn.layers.base import Value

Kinds: TypeAlias = tuple[tuple[type[Layer], ...], ...]  # the types of layers of some runs


def find_runs(
    layers: Sequence[Layer], reads: Sequence[tuple[str, ...]], kinds: Kinds | None = None
) -> list[tuple[int, ...]]:
    """Group the layers into runs, and return the indices of the layers of each run.

    A layer that is not fused is a run of one layer. `kinds` are the runs to look for, by default
    all RUNS.
    """
    kinds = RUNS if kinds is None else kinds
    readers: dict[str, list[Layer]] = collections.defaultdict(list)
    for layer, names in zip(layers, reads, strict=True):
        for name in names:
            readers[name].append(layer)
    runs, i = [], 0
    while i < len(layers):
        count = next((len(run) for run in kinds if _begins(run, layers[i:], reads[i:], readers)), 1)
        runs.append(tuple(range(i, i + count)))
        i += count
    return runs


RUNS: Kinds = (
    (Conv2D, BatchNorm, ReLU),
    (Conv2D, BatchNorm, Clip),
    (Conv2D, Add, ReLU),
    (Conv2D, ReLU, CrossChannelNorm, MaxPool2D),
    (Concat, Conv2D, ReLU),
    (Conv2D, ReLU),
    (Conv2D, BatchNorm),
    (Add, ReLU),
)


# layers that can normalize their input while they read it; a subclass may compute something else
NORMALIZING = {Add, Conv2D, GELU, HardSigmoid, HardSwish, LeakyReLU, Sigmoid, Swish, Tanh}


def _begins(run, layers, reads, readers):
    """Return whether the first layers have the types in `run` and can be fused.

    `reads` contains the names of the outputs that each layer reads, and `readers` the layers that
    read each output.
    """
    if tuple(type(layer) for layer in layers[: len(run)]) != run:
        return False
    if run[0] in (Add, Concat) and len(reads[0]) != 2:
        return False
    if run[0] is Concat and (layers[1].groups > 1 or layers[1].size in (1, (1, 1), [1, 1])):
        return False  # such convolutions do not copy their input in parts
    if run[-1] is BatchNorm:
        types = {type(layer) for layer in readers[layers[len(run) - 1].name]}
        if not types or not types <= NORMALIZING:
            return False
    for before, layer, names in zip(layers, layers[1 : len(run)], reads[1:], strict=False):
        inputs = 2 if type(layer) is Add else 1
        if names.count(before.name) != 1 or len(names) != inputs or len(readers[before.name]) != 1:
            return False
    return True


def _limits(layer):
    """Return the range (low, high) of an activation's results, or None for another layer."""
    if isinstance(layer, Clip):
        return layer.low, layer.high
    return (0.0, math.inf) if isinstance(layer, ReLU) else None


def outer_reads(run: Sequence[Layer], reads: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of the outputs of other runs that a run reads, in layer order."""
    names = {layer.name for layer in run}
    return tuple(name for layer_reads in reads for name in layer_reads if name not in names)


def supported(x: Any) -> Kinds:
    """Return the runs that the backend of `x` computes by one op."""
    return RUNS if backends.of_value(value_of(x)).fuses_convolutions else ()


def forward(run: Sequence[Layer], x: Sequence[Any], contexts: Sequence[LayerContext]) -> Value:
    """Compute a run of several layers by one op; `x` contains the values of its `outer_reads`."""
    if isinstance(run[0], Add):
        return ops.add_relu(*x)
    joins = isinstance(run[0], Concat)
    conv: Any = run[1] if joins else run[0]
    context = contexts[1] if joins else contexts[0]
    options: dict[str, Any] = {
        "stride": conv.stride,
        "padding": conv.padding,
        "dilation": conv.dilation,
        "groups": conv.groups,
    }
    weight, bias = context["weight"], conv.bias_of(context)
    if joins:
        return ops.conv2d_concat_relu(x[0], x[1], weight, bias, **options)
    if isinstance(run[-1], MaxPool2D):
        lrn: Any = run[-2]
        pool: Any = run[-1]
        options["norm"] = lrn.window, lrn.alpha, lrn.beta, lrn.k
        options["windows"] = pool.size, pool.stride, pool.padding
        return ops.conv2d_relu_norm_max_pool(x[0], weight, bias, **options)
    if not isinstance(run[1], BatchNorm):
        return ops.conv2d_relu(x[0], weight, bias, *x[1:], **options)
    norm, norm_context = run[1], contexts[1]
    options |= {"epsilon": norm.epsilon, "limits": _limits(run[-1])}
    gamma, beta = norm_context["gamma"], norm_context["beta"]
    if not norm_context.training:
        mean, variance = norm.running(norm_context)
        return ops.conv2d_batchnorm_predict(
            x[0], weight, bias, mean, variance, gamma, beta, **options
        )
    return ops.conv2d_batchnorm(
        x[0],
        weight,
        bias,
        gamma,
        beta,
        scope=context.batchnorm,
        record=norm.recorder(norm_context),
        **options,
    )
