"""mpidl: data-parallel training of convolutional networks on MPI ranks.

The same seed, data and options give the same weights, byte for byte, on any number of ranks.
"""

import os
import sys

# Set one BLAS thread before NumPy loads: a BLAS may split a product among its threads, and the
# number of threads would change the order of additions.
for _name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "BLIS_NUM_THREADS"):
    os.environ[_name] = "1"
if "numpy" in sys.modules:
    import threadpoolctl

    threadpoolctl.threadpool_limits(1, user_api="blas")

from mpidl import data, nn, ops
from mpidl.autodiff import Var, check_vjp, op, value_and_grad
from mpidl.backends import configure
from mpidl.blocks import Batch, Blocked, OneRank, from_images, share
from mpidl.comm import World
from mpidl.comm.launch import launch
from mpidl.data import ArrayDatastore, Augmenter, ImageFolder, MinibatchQueue, Preprocess
from mpidl.errors import Fault, RankError, UserError
from mpidl.evaluation.confusion import Confusion, confusion_matrix
from mpidl.evaluation.evaluate import Evaluation, RegressionErrors, evaluate, regression_errors
from mpidl.evaluation.predict import activations, classify, predict
from mpidl.fold import Partial
from mpidl.nn import (
    Add,
    AveragePool2D,
    BatchNorm,
    Built,
    Concat,
    Conv2D,
    CrossChannelNorm,
    Dense,
    Dropout,
    Flatten,
    GlobalAveragePool2D,
    Layer,
    LeakyReLU,
    MaxPool2D,
    Network,
    ReLU,
    Sigmoid,
    Softmax,
    Tanh,
    TransposedConv2D,
    analyze,
)
from mpidl.ops import (
    add,
    average_pool2d,
    batchnorm,
    batchnorm_predict,
    concat,
    conv2d,
    correct_count,
    cross_channel_norm,
    dense,
    divide,
    dropout,
    exp,
    flatten,
    global_average_pool2d,
    leaky_relu,
    log,
    max_pool2d,
    mean,
    mean_absolute_error,
    mean_squared_error,
    multiply,
    negative,
    power,
    relu,
    reshape,
    sigmoid,
    softmax,
    softmax_cross_entropy,
    sqrt,
    subtract,
    sum,
    tanh,
    total,
    transpose,
    transposed_conv2d,
)
from mpidl.training.files.model_file import load_model, save_model, weights_sha256
from mpidl.training.optimizers import SGDM, Adam, RMSProp
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.trainer import train

__version__ = "0.1.0"

__all__ = [
    "Adam",
    "Add",
    "ArrayDatastore",
    "Augmenter",
    "AveragePool2D",
    "Batch",
    "BatchNorm",
    "Blocked",
    "Built",
    "Concat",
    "Confusion",
    "Conv2D",
    "CrossChannelNorm",
    "Dense",
    "Dropout",
    "Evaluation",
    "Fault",
    "Flatten",
    "GlobalAveragePool2D",
    "ImageFolder",
    "Layer",
    "LeakyReLU",
    "MaxPool2D",
    "MinibatchQueue",
    "Network",
    "OneRank",
    "Partial",
    "Preprocess",
    "RMSProp",
    "RankError",
    "ReLU",
    "RegressionErrors",
    "SGDM",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "TrainingOptions",
    "TransposedConv2D",
    "UserError",
    "Var",
    "World",
    "activations",
    "add",
    "analyze",
    "average_pool2d",
    "batchnorm",
    "batchnorm_predict",
    "check_vjp",
    "classify",
    "concat",
    "configure",
    "confusion_matrix",
    "conv2d",
    "correct_count",
    "cross_channel_norm",
    "data",
    "dense",
    "divide",
    "dropout",
    "evaluate",
    "exp",
    "flatten",
    "from_images",
    "global_average_pool2d",
    "launch",
    "leaky_relu",
    "load_model",
    "log",
    "max_pool2d",
    "mean",
    "mean_absolute_error",
    "mean_squared_error",
    "multiply",
    "negative",
    "nn",
    "op",
    "ops",
    "power",
    "predict",
    "regression_errors",
    "relu",
    "reshape",
    "save_model",
    "share",
    "sigmoid",
    "softmax",
    "softmax_cross_entropy",
    "sqrt",
    "subtract",
    "sum",
    "tanh",
    "total",
    "train",
    "transpose",
    "transposed_conv2d",
    "value_and_grad",
    "weights_sha256",
]
