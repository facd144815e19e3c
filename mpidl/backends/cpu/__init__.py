"""C backend: the functions of `reference`, with the same arguments, by the compiled kernels.

Those that read activations take an array or a DeferredInput. What is not on the path
of a training step is NumPy's here too.
"""

from mpidl.backends.cpu.batchnorm import (
    activation,
    activation_sums,
    batchnorm,
    batchnorm_dx,
    batchnorm_sums,
    channel_sums,
    moments,
    relu,
    relu_dx,
)
from mpidl.backends.cpu.conv import conv2d, conv2d_backward, conv2d_moments
from mpidl.backends.cpu.dense import dense, dense_backward, dense_dweight, dense_dx
from mpidl.backends.cpu.images import images, keyed_words, planes, warp
from mpidl.backends.cpu.loss import (
    correct_count,
    cross_entropy,
    cross_entropy_dlogits,
    errors,
    errors_dy,
    softmax,
    softmax_dx,
)
from mpidl.backends.cpu.more import (
    add,
    concat,
    cross_channel_norm,
    cross_channel_norm_dx,
    dropout,
    leaky_relu,
    leaky_relu_dx,
    sigmoid,
    sigmoid_dx,
    split,
    tanh,
    tanh_dx,
)
from mpidl.backends.cpu.optimizer import adam, clip, rmsprop, sgdm, zeros_like
from mpidl.backends.cpu.pool import (
    average_pool2d,
    average_pool2d_dx,
    max_pool2d,
    max_pool2d_dx,
)
from mpidl.backends.cpu.transposed import transposed_conv2d, transposed_conv2d_backward
from mpidl.backends.reference import (
    batchnorm_factors,
    conv2d_shape,
    image_sums,
    predict_scale,
    running,
    source,
    statistics,
    step_number,
)

__all__ = [
    "activation",
    "activation_sums",
    "add",
    "adam",
    "average_pool2d",
    "average_pool2d_dx",
    "batchnorm",
    "batchnorm_dx",
    "batchnorm_factors",
    "batchnorm_sums",
    "channel_sums",
    "concat",
    "clip",
    "conv2d",
    "conv2d_backward",
    "conv2d_moments",
    "conv2d_shape",
    "correct_count",
    "cross_channel_norm",
    "cross_channel_norm_dx",
    "cross_entropy",
    "cross_entropy_dlogits",
    "dense",
    "dense_backward",
    "dense_dweight",
    "dense_dx",
    "dropout",
    "errors",
    "errors_dy",
    "image_sums",
    "images",
    "keyed_words",
    "leaky_relu",
    "leaky_relu_dx",
    "max_pool2d",
    "max_pool2d_dx",
    "moments",
    "step_number",
    "planes",
    "predict_scale",
    "relu",
    "relu_dx",
    "rmsprop",
    "running",
    "sgdm",
    "sigmoid",
    "sigmoid_dx",
    "softmax",
    "softmax_dx",
    "source",
    "split",
    "statistics",
    "tanh",
    "tanh_dx",
    "transposed_conv2d",
    "transposed_conv2d_backward",
    "warp",
    "zeros_like",
]
