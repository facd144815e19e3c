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
from mpidl.nn import Network, analyze
from mpidl.nn.layers.activation import *
from mpidl.nn.layers.base import Built, Layer
from mpidl.nn.layers.convolution import *
from mpidl.nn.layers.dense import *
from mpidl.nn.layers.dropout import *
from mpidl.nn.layers.joins import *
from mpidl.nn.layers.normalization import *
from mpidl.nn.layers.pooling import *
from mpidl.nn.layers.shape import *
from mpidl.ops.activation import *
from mpidl.ops.arithmetic import *
from mpidl.ops.batchnorm import *
from mpidl.ops.concat import *
from mpidl.ops.conv import *
from mpidl.ops.dense import *
from mpidl.ops.dropout import *
from mpidl.ops.loss import *
from mpidl.ops.lrn import *
from mpidl.ops.pool import *
from mpidl.ops.transposed import *
from mpidl.training.files.model_file import load_model, save_model, weights_sha256
from mpidl.training.optimizers import SGDM, Adam, AdamW, RMSProp
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.trainer import train

__version__ = "0.1.0"
