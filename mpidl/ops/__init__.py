"""The ops: one file per family, with forward and vjp side by side."""

from mpidl.ops.activation import leaky_relu, relu, sigmoid, softmax, tanh
from mpidl.ops.arithmetic import (
    add,
    divide,
    exp,
    log,
    multiply,
    negative,
    power,
    reshape,
    sqrt,
    subtract,
    total,
    transpose,
)
from mpidl.ops.batchnorm import (
    batchnorm,
    batchnorm_predict,
    conv2d_batchnorm_relu,
    conv2d_batchnorm_relu_predict,
)
from mpidl.ops.concat import concat
from mpidl.ops.conv import conv2d
from mpidl.ops.dense import dense, flatten
from mpidl.ops.dropout import dropout, dropout_threshold
from mpidl.ops.loss import (
    correct_count,
    mean,
    mean_absolute_error,
    mean_squared_error,
    softmax_cross_entropy,
    sum,
)
from mpidl.ops.lrn import cross_channel_norm
from mpidl.ops.pool import average_pool2d, global_average_pool2d, max_pool2d
from mpidl.ops.transposed import transposed_conv2d

__all__ = [
    "add",
    "average_pool2d",
    "batchnorm",
    "batchnorm_predict",
    "concat",
    "conv2d",
    "conv2d_batchnorm_relu",
    "conv2d_batchnorm_relu_predict",
    "correct_count",
    "cross_channel_norm",
    "dense",
    "divide",
    "dropout",
    "dropout_threshold",
    "exp",
    "flatten",
    "global_average_pool2d",
    "leaky_relu",
    "log",
    "max_pool2d",
    "mean",
    "mean_absolute_error",
    "mean_squared_error",
    "multiply",
    "negative",
    "power",
    "relu",
    "reshape",
    "sigmoid",
    "softmax",
    "softmax_cross_entropy",
    "sqrt",
    "subtract",
    "sum",
    "tanh",
    "total",
    "transpose",
    "transposed_conv2d",
]
