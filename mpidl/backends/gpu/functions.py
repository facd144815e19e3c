"""What the GPU backend offers: the functions of `reference`, with the same arguments.

Values per image have the shape they have everywhere, (blocks, *image_shape, 16), and lie in memory
as NHWC (`array`). A function launches kernels, or has them recorded (`run`, `program`); none waits
for the device or looks at a number. Sums go to the fold (`fold`), those over ranks too (`sums`).
"""

from mpidl.backends.gpu.array import placed
from mpidl.backends.gpu.batchnorm import (
    activation,
    activation_sums,
    batchnorm,
    batchnorm_dx,
    batchnorm_factors,
    batchnorm_sums,
    channel_sums,
    moments,
    predict_scale,
    relu,
    relu_dx,
    running,
    source,
    statistics,
)
from mpidl.backends.gpu.conv import conv2d, conv2d_backward, conv2d_moments
from mpidl.backends.gpu.dense import dense, dense_backward, dense_dweight, dense_dx
from mpidl.backends.gpu.elementwise import zeros_like
from mpidl.backends.gpu.images import floats, images, targets
from mpidl.backends.gpu.loss import (
    correct_count,
    cross_entropy,
    cross_entropy_dlogits,
    errors,
    errors_dy,
    softmax,
    softmax_dx,
)
from mpidl.backends.gpu.more import (
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
from mpidl.backends.gpu.optimizer import adam, clip, rmsprop, sgdm, step_number
from mpidl.backends.gpu.pool import (
    average_pool2d,
    average_pool2d_dx,
    max_pool2d,
    max_pool2d_dx,
)
from mpidl.backends.gpu.transposed import transposed_conv2d, transposed_conv2d_backward
from mpidl.backends.reference import conv2d_shape

__all__ = [
    "activation",
    "activation_sums",
    "adam",
    "add",
    "average_pool2d",
    "average_pool2d_dx",
    "batchnorm",
    "batchnorm_dx",
    "batchnorm_factors",
    "batchnorm_sums",
    "channel_sums",
    "clip",
    "concat",
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
    "floats",
    "images",
    "leaky_relu",
    "leaky_relu_dx",
    "max_pool2d",
    "max_pool2d_dx",
    "moments",
    "step_number",
    "placed",
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
    "targets",
    "transposed_conv2d",
    "transposed_conv2d_backward",
    "zeros_like",
]
