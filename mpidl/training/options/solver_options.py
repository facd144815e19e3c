"""The options of how long and how to train: length, loss, solver, learning rate, gradient clipping.

Annotations stay real types, not strings, so that help() prints them as they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mpidl.losses import LOSSES
from mpidl.training.options.option_types import (
    Rule,
    at_least,
    factor,
    fraction,
    one_of,
    option,
    positive,
)

# Defaults that depend on the solver.
BY_SOLVER: dict[str, dict[str, float]] = {
    "learning_rate": {"sgdm": 0.01, "adam": 0.001, "rmsprop": 0.001},
    "squared_gradient_decay_factor": {"adam": 0.999, "rmsprop": 0.9},
}


@dataclass(frozen=True, kw_only=True)
class SolverOptions:
    """The part of `TrainingOptions` about the length of training, the loss and the solver."""

    epochs: int = option(
        30,
        at_least(1),
        "Number of passes over the training set",
        resume="up",
        matlab="MaxEpochs",
    )
    max_iterations: int | None = option(
        None,
        at_least(1, optional=True),
        "Stop after this many mini-batches in total, including those before a resume",
    )
    batch_size: int = option(
        128,
        at_least(1),
        "Images per mini-batch, over all ranks",
        resume="fixed",
        matlab="MiniBatchSize",
    )
    batch_per_rank: int | None = option(
        None,
        at_least(1, optional=True),
        "Images per mini-batch on each rank: the batch size is this times the number of ranks "
        "(the weights then depend on the number of ranks)",
        matlab="miniBatchSize*N",
    )
    loss: Literal["crossentropy", "mse", "mae"] | Callable[..., Any] = option(
        "crossentropy",
        one_of(*LOSSES, allow_function=True),
        "Loss to minimize: cross-entropy of labels (one per image or per pixel), or mean squared "
        "or mean absolute error of targets; in Python also a function of network, images and "
        "targets",
        resume="fixed",
        matlab="lossFcn of trainnet; classificationLayer, regressionLayer",
    )
    solver: Literal["sgdm", "adam", "rmsprop"] = option(
        "sgdm",
        one_of("sgdm", "adam", "rmsprop"),
        "Optimizer: SGD with momentum, Adam or RMSProp",
        resume="fixed",
        matlab="solverName",
    )
    learning_rate: float | None = option(
        None,
        positive(optional=True),
        "Initial learning rate",
        resume="fixed",
        matlab="InitialLearnRate",
    )
    momentum: float = option(
        0.9,
        fraction(),
        "Fraction of the previous step that sgdm adds to the current one",
        resume="fixed",
        matlab="Momentum",
    )
    gradient_decay_factor: float = option(
        0.9,
        fraction(),
        "Decay of the moving mean of the gradient (adam)",
        resume="fixed",
        matlab="GradientDecayFactor",
    )
    squared_gradient_decay_factor: float | None = option(
        None,
        fraction(optional=True),
        "Decay of the moving mean of the squared gradient (adam, rmsprop)",
        resume="fixed",
        matlab="SquaredGradientDecayFactor",
    )
    epsilon: float = option(
        1e-8,
        positive(),
        "Constant added to the denominator of a step (adam, rmsprop)",
        resume="fixed",
        matlab="Epsilon",
    )
    scale_rate: int | None = option(
        None,
        at_least(1, optional=True),
        "Batch size that the learning rate is meant for; the rate is multiplied by batch size / "
        "this number",
        resume="fixed",
        matlab="0.1*miniBatchSize/256",
    )
    learn_rate_schedule: (
        Literal["none", "piecewise", "cosine", "polynomial"] | Callable[[int, int], float]
    ) = option(
        "none",
        one_of("none", "piecewise", "cosine", "polynomial", allow_function=True),
        "How the learning rate falls: not at all, in drops, or with every iteration until the end "
        "of the last epoch; in Python also a function of epoch and iteration, both counted from 1",
        resume="fixed",
        matlab="LearnRateSchedule",
    )
    learn_rate_drop_factor: float = option(
        0.1,
        factor(),
        "Factor that each drop multiplies the learning rate by (piecewise)",
        resume="fixed",
        matlab="LearnRateDropFactor",
    )
    learn_rate_drop_period: int = option(
        10,
        at_least(1),
        "Epochs between drops (piecewise)",
        resume="fixed",
        matlab="LearnRateDropPeriod",
    )
    learn_rate_power: float = option(
        1.0,
        positive(),
        "Exponent of the fraction of iterations that remain (polynomial)",
        resume="fixed",
        matlab="polynomialLearnRate(Power)",
    )
    learn_rate_final_factor: float = option(
        0.0,
        fraction(),
        "Fraction of the learning rate that remains at the end (cosine, polynomial)",
        resume="fixed",
        matlab="FinalFactor",
    )
    warmup_iterations: int = option(
        0,
        at_least(0),
        "Iterations during which the learning rate rises to the start of the schedule",
        resume="fixed",
        matlab='"warmup"',
    )
    warmup_epochs: int = option(
        0,
        at_least(0),
        "Epochs during which the learning rate rises to the start of the schedule",
        resume="fixed",
        matlab='warmupLearnRate(FrequencyUnit="epoch")',
    )
    warmup_factor: float = option(
        0.1,
        factor(),
        "Fraction of the learning rate that a warm-up starts from",
        resume="fixed",
        matlab="warmupLearnRate(InitialFactor)",
    )
    l2: float = option(
        1e-4,
        Rule(float, "at least 0", 0),
        "L2 regularization factor; applies to weights only",
        resume="fixed",
        matlab="L2Regularization",
    )
    gradient_threshold: float = option(
        math.inf,
        positive(allow_inf=True),
        "Clip gradients above this value, L2 regularization included; inf disables clipping",
        resume="fixed",
        matlab="GradientThreshold",
    )
    gradient_threshold_method: Literal["l2norm", "global-l2norm", "absolute-value"] = option(
        "l2norm",
        one_of("l2norm", "global-l2norm", "absolute-value"),
        "What to clip: the norm of each learnable's gradient, the norm of all gradients together, "
        "or each element",
        resume="fixed",
        matlab="GradientThresholdMethod",
    )
