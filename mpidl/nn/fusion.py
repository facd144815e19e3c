"""Which neighbouring layers run as one op: a peephole over the list of layers.

Convolution, batch normalization and ReLU become one op that stores the convolution's output alone;
the layers behind it (convolution, pooling, dense) read that through the normalization and the ReLU.
They stand side by side in the list, and nobody else reads what is between them; the op's output may
have several readers, whose cotangents add up. The network, its learnables and its numbers are the
same either way.
"""

import collections

from mpidl import backends, ops
from mpidl.nn.layers import BatchNorm, Conv2D, ReLU


def runs(layers, reads):
    """The numbers of the layers as a list of runs, each of which is applied at once.

    reads: of each layer, the names that it reads.
    """
    readers = collections.Counter(name for names in reads for name in names)
    found, i = [], 0
    while i < len(layers):
        three = layers[i : i + 3]
        kinds = tuple(type(layer) for layer in three)
        alone = kinds == (Conv2D, BatchNorm, ReLU) and all(
            reads[i + j + 1] == (three[j].name,) and readers[three[j].name] == 1 for j in (0, 1)
        )
        count = 3 if alone else 1
        found.append(tuple(range(i, i + count)))
        i += count
    return found


def fuses(x):
    """Whether the backend of a value reads activations that are not stored."""
    return backends.of(x).fuses_convolutions


def forward(run, x, places):
    """The output of a run of three for x; `places`: the At of each layer."""
    conv, norm, _ = run
    at, norm_at, _ = places
    how = {
        "stride": conv.stride,
        "padding": conv.padding,
        "dilation": conv.dilation,
        "groups": conv.groups,
        "epsilon": norm.epsilon,
    }
    gamma, beta = norm_at["gamma"], norm_at["beta"]
    if not norm_at.training:
        return ops.conv2d_batchnorm_relu_predict(
            x, at["weight"], at["bias"], *norm.running(norm_at), gamma, beta, **how
        )
    return ops.conv2d_batchnorm_relu(
        x,
        at["weight"],
        at["bias"],
        gamma,
        beta,
        scope=at.batchnorm,
        record=norm.recorder(norm_at),
        **how,
    )
