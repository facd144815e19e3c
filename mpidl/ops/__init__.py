"""The differentiable ops: one file per family, with each forward function beside its vjp.

To export a new op, add its name to the `__all__` of its family. No other list needs it.
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
