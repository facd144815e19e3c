"""The ops: one file per family, with forward and vjp side by side.

A new op is named in the `__all__` of its family, and nowhere else.
"""

from mpidl.ops.activation import *
from mpidl.ops.arithmetic import *
from mpidl.ops.batchnorm import *
from mpidl.ops.batchnorm import conv2d_batchnorm_relu as conv2d_batchnorm_relu
from mpidl.ops.batchnorm import conv2d_batchnorm_relu_predict as conv2d_batchnorm_relu_predict
from mpidl.ops.concat import *
from mpidl.ops.conv import *
from mpidl.ops.dense import *
from mpidl.ops.dropout import *
from mpidl.ops.dropout import dropout_threshold as dropout_threshold
from mpidl.ops.loss import *
from mpidl.ops.lrn import *
from mpidl.ops.pool import *
from mpidl.ops.transposed import *
