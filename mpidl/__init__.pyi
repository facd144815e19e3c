from mpidl import data as data
from mpidl import nn as nn
from mpidl import ops as ops
from mpidl.backends import configure as configure
from mpidl.certificates.audit import audit as audit
from mpidl.core import keyed as keyed
from mpidl.core.blocks import Batch as Batch
from mpidl.core.blocks import Blocked as Blocked
from mpidl.core.blocks import OneRank as OneRank
from mpidl.core.blocks import from_images as from_images
from mpidl.core.blocks import share as share
from mpidl.core.fold import Partial as Partial
from mpidl.core.grad import value_and_grad as value_and_grad
from mpidl.core.op import op as op
from mpidl.core.tape import Var as Var
from mpidl.data import ArrayDatastore as ArrayDatastore
from mpidl.data import Augmenter as Augmenter
from mpidl.data import ImageFolder as ImageFolder
from mpidl.data import MinibatchQueue as MinibatchQueue
from mpidl.data import Preprocess as Preprocess
from mpidl.errors import Fault as Fault
from mpidl.errors import RankError as RankError
from mpidl.errors import UserError as UserError
from mpidl.evaluation.class_metrics import ClassMetrics as ClassMetrics
from mpidl.evaluation.confusion import Confusion as Confusion
from mpidl.evaluation.confusion import confusion_matrix as confusion_matrix
from mpidl.evaluation.evaluate import Evaluation as Evaluation
from mpidl.evaluation.evaluate import RegressionErrors as RegressionErrors
from mpidl.evaluation.evaluate import evaluate as evaluate
from mpidl.evaluation.evaluate import regression_errors as regression_errors
from mpidl.evaluation.predict import activations as activations
from mpidl.evaluation.predict import classify as classify
from mpidl.evaluation.predict import predict as predict
from mpidl.explanations.explain import Explanation as Explanation
from mpidl.explanations.explain import explain as explain
from mpidl.interchange.onnx_export import save_onnx as save_onnx
from mpidl.interchange.onnx_import import load_onnx as load_onnx
from mpidl.interchange.weights import load_weights as load_weights
from mpidl.interchange.weights import save_weights as save_weights
from mpidl.jobs.launch import launch as launch
from mpidl.losses import BinaryCrossEntropy as BinaryCrossEntropy
from mpidl.losses import CrossEntropy as CrossEntropy
from mpidl.losses.overlap_losses import *
from mpidl.nn import Network as Network
from mpidl.nn import analyze as analyze
from mpidl.nn.layers.activation import *
from mpidl.nn.layers.base import Built as Built
from mpidl.nn.layers.base import Layer as Layer
from mpidl.nn.layers.convolution import *
from mpidl.nn.layers.dense import *
from mpidl.nn.layers.dropout import *
from mpidl.nn.layers.gates import *
from mpidl.nn.layers.group_norm import *
from mpidl.nn.layers.joins import *
from mpidl.nn.layers.normalization import *
from mpidl.nn.layers.pooling import *
from mpidl.nn.layers.recurrent import *
from mpidl.nn.layers.resize import *
from mpidl.nn.layers.shape import *
from mpidl.nn.transfer import transfer as transfer
from mpidl.ops.activation import *
from mpidl.ops.arithmetic import *
from mpidl.ops.batchnorm import *
from mpidl.ops.binary_loss import *
from mpidl.ops.channels import *
from mpidl.ops.concat import *
from mpidl.ops.conv import *
from mpidl.ops.dense import *
from mpidl.ops.dropout import *
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
from mpidl.ops.vjp_check import check_vjp as check_vjp
from mpidl.published.imagenet_networks import pretrained as pretrained
from mpidl.ranks.world import World as World
from mpidl.report.history import History as History
from mpidl.report.run_files import history as history
from mpidl.sweeps.sweep import sweep as sweep
from mpidl.trackers.mlflow import MLflowHook as MLflowHook
from mpidl.trackers.tensorboard import TensorBoardHook as TensorBoardHook
from mpidl.trackers.wandb import WandbHook as WandbHook
from mpidl.training.files.model_file import load_model as load_model
from mpidl.training.files.model_file import save_model as save_model
from mpidl.training.files.model_file import weights_sha256 as weights_sha256
from mpidl.training.loop_run import report_to as report_to
from mpidl.training.optimizers.solvers import *
from mpidl.training.options.training_options import TrainingOptions as TrainingOptions
from mpidl.training.train import train as train
from mpidl.training.whitening import whiten as whiten

__version__: str
