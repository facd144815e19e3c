"""Losses for training and evaluation: functions of a network, images and targets."""

import sys

from mpidl.lazy import LazyPackage

sys.modules[__name__].__class__ = LazyPackage
