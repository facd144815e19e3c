from mpidl.ops.activation import *
from mpidl.ops.add_relu import add_relu as add_relu
from mpidl.ops.arithmetic import *
from mpidl.ops.batchnorm import *
from mpidl.ops.batchnorm import conv2d_batchnorm as conv2d_batchnorm
from mpidl.ops.batchnorm import conv2d_batchnorm_predict as conv2d_batchnorm_predict
from mpidl.ops.binary_loss import *
from mpidl.ops.binary_loss import binary_label_count as binary_label_count
from mpidl.ops.channels import *
from mpidl.ops.concat import *
from mpidl.ops.conv import *
from mpidl.ops.conv import conv2d_relu as conv2d_relu
from mpidl.ops.conv_concat import conv2d_concat_relu as conv2d_concat_relu
from mpidl.ops.conv_norm_pool import conv2d_relu_norm_max_pool as conv2d_relu_norm_max_pool
from mpidl.ops.dense import *
from mpidl.ops.dropout import *
from mpidl.ops.dropout import dropout_threshold as dropout_threshold
from mpidl.ops.gates import *
from mpidl.ops.group_norm import *
from mpidl.ops.loss import *
from mpidl.ops.lrn import *
from mpidl.ops.overlap import *
from mpidl.ops.pad import *
from mpidl.ops.pool import *
from mpidl.ops.probabilities import *
from mpidl.ops.recurrent import *
from mpidl.ops.reductions import *
from mpidl.ops.resize import *
from mpidl.ops.transposed import *
