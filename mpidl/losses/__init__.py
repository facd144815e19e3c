"""Losses for training and evaluation: functions of a network, images and targets."""

from mpidl.losses.base import LabelLoss as LabelLoss
from mpidl.losses.binary_cross_entropy_loss import BinaryCrossEntropy as BinaryCrossEntropy
from mpidl.losses.checks import check as check
from mpidl.losses.checks import check_names as check_names
from mpidl.losses.checks import label_range as label_range
from mpidl.losses.checks import labels_per_image as labels_per_image
from mpidl.losses.checks import need_network as need_network
from mpidl.losses.checks import output_class_names as output_class_names
from mpidl.losses.checks import trained_classes as trained_classes
from mpidl.losses.cross_entropy_loss import CrossEntropy as CrossEntropy
from mpidl.losses.dice_loss import Dice as Dice
from mpidl.losses.label_checks import targets_shape as targets_shape
from mpidl.losses.named import LOSSES as LOSSES
from mpidl.losses.named import cross_entropy as cross_entropy
from mpidl.losses.named import has_class_scores as has_class_scores
from mpidl.losses.named import has_label_scores as has_label_scores
from mpidl.losses.named import label_loss as label_loss
from mpidl.losses.named import loss_function as loss_function
from mpidl.losses.named import loss_with_options as loss_with_options
from mpidl.losses.named import mean_squared_error as mean_squared_error
from mpidl.losses.trained import check_trained_loss as check_trained_loss
from mpidl.losses.trained import has_separate_labels as has_separate_labels
from mpidl.losses.trained import label_names as label_names
from mpidl.losses.trained import loss_of as loss_of
from mpidl.losses.trained import trained_loss as trained_loss
