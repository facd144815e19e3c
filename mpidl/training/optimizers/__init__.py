"""Optimizers: chains of small transforms, each of which works alone."""

from mpidl.training.optimizers.chain import Optimizer
from mpidl.training.optimizers.solvers import SGDM, Adam, RMSProp, of_options
from mpidl.training.optimizers.transforms import (
    AdamMoments,
    Clip,
    Momentum,
    Rate,
    RMSPropMoment,
    Transform,
    WeightDecay,
)

__all__ = [
    "Adam",
    "AdamMoments",
    "Clip",
    "Momentum",
    "Optimizer",
    "RMSProp",
    "RMSPropMoment",
    "Rate",
    "SGDM",
    "Transform",
    "WeightDecay",
    "of_options",
]
