"""The options of how long to train, and by what steps: solver, rates, what is done to gradients."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from mpidl.losses import LOSSES
from mpidl.training.options.option_types import Rule, at_least, one_of, option, positive, share

# What depends on the solver where it is not given.
BY_SOLVER: dict[str, dict[str, float]] = {
    "learning_rate": {"sgdm": 0.01, "adam": 0.001, "rmsprop": 0.001},
    "squared_gradient_decay_factor": {"adam": 0.999, "rmsprop": 0.9},
}


@dataclass(frozen=True, kw_only=True)
class SolverOptions:
    """Part of `options.TrainingOptions`."""

    epochs: int = option(
        30, at_least(1), "passes over the training set", resume="up", matlab="MaxEpochs"
    )
    max_iterations: int | None = option(
        None,
        at_least(1, optional=True),
        "stop after this many mini-batches in all, resumed runs included",
    )
    batch_size: int = option(
        128,
        at_least(1),
        "images in a mini-batch, over all ranks",
        resume="fixed",
        matlab="MiniBatchSize",
    )
    batch_per_rank: int | None = option(
        None,
        at_least(1, optional=True),
        "images of a mini-batch for each rank: a batch size of this times the ranks, so that the "
        "weights depend on their number",
        matlab="miniBatchSize*N",
    )
    loss: str | Callable = option(
        "crossentropy",
        one_of(*LOSSES, function=True),
        "what is minimized: cross-entropy of labels, an image or a pixel, or the mean squared or "
        "absolute error of targets; in Python also a function of network, images and targets",
        resume="fixed",
        matlab="lossFcn of trainnet; classificationLayer, regressionLayer",
    )
    solver: str = option(
        "sgdm",
        one_of("sgdm", "adam", "rmsprop"),
        "the optimizer: SGD with momentum, Adam or RMSProp",
        resume="fixed",
        matlab="solverName",
    )
    learning_rate: float | None = option(
        None,
        positive(optional=True),
        "step of the optimizer at the start; none: 0.01 with sgdm, 0.001 with adam and rmsprop",
        resume="fixed",
        matlab="InitialLearnRate",
    )
    momentum: float = option(
        0.9,
        share(),
        "sgdm: share of the last step that is kept",
        resume="fixed",
        matlab="Momentum",
    )
    gradient_decay_factor: float = option(
        0.9,
        share(),
        "adam: decay of the moving mean of the gradient",
        resume="fixed",
        matlab="GradientDecayFactor",
    )
    squared_gradient_decay_factor: float | None = option(
        None,
        share(optional=True),
        "adam, rmsprop: decay of the moving mean of its square; none: 0.999 with adam, 0.9 with "
        "rmsprop",
        resume="fixed",
        matlab="SquaredGradientDecayFactor",
    )
    epsilon: float = option(
        1e-8,
        positive(),
        "adam, rmsprop: added to the root that a step is divided by",
        resume="fixed",
        matlab="Epsilon",
    )
    scale_rate: int | None = option(
        None,
        at_least(1, optional=True),
        "the batch size that the learning rate is for: others have it times batch size / this",
        resume="fixed",
        matlab="0.1*miniBatchSize/256",
    )
    learn_rate_schedule: str | Callable = option(
        "none",
        one_of("none", "piecewise", "cosine", "polynomial", function=True),
        "how the learning rate falls: not at all, in drops, or with every iteration to the end of "
        "the last epoch; in Python also a function of epoch and iteration, both from 1",
        resume="fixed",
        matlab="LearnRateSchedule",
    )
    learn_rate_drop_factor: float = option(
        0.1,
        Rule(float, "above 0 and at most 1", 0, 1, above=True),
        "piecewise: the rate times this at each drop",
        resume="fixed",
        matlab="LearnRateDropFactor",
    )
    learn_rate_drop_period: int = option(
        10, at_least(1), "piecewise: epochs to a drop", resume="fixed", matlab="LearnRateDropPeriod"
    )
    learn_rate_power: float = option(
        1.0,
        positive(),
        "polynomial: the power of the share of iterations that is left",
        resume="fixed",
        matlab="polynomialLearnRate(Power)",
    )
    learn_rate_final_factor: float = option(
        0.0,
        share(),
        "cosine, polynomial: the share of the rate that is left at the end",
        resume="fixed",
        matlab="FinalFactor",
    )
    warmup_iterations: int = option(
        0,
        at_least(0),
        "iterations in which the rate rises to what the schedule begins with",
        resume="fixed",
        matlab='"warmup"',
    )
    warmup_epochs: int = option(
        0,
        at_least(0),
        "the same in epochs",
        resume="fixed",
        matlab='warmupLearnRate(FrequencyUnit="epoch")',
    )
    warmup_factor: float = option(
        0.1,
        Rule(float, "above 0 and at most 1", 0, 1, above=True),
        "the share of the rate that a warm-up begins with",
        resume="fixed",
        matlab="warmupLearnRate(InitialFactor)",
    )
    l2: float = option(
        1e-4,
        Rule(float, "at least 0", 0),
        "L2 regularization, of weights alone",
        resume="fixed",
        matlab="L2Regularization",
    )
    gradient_threshold: float = option(
        math.inf,
        positive(infinite=True),
        "gradients larger than this are made as small, L2 regularization included; inf: none is",
        resume="fixed",
        matlab="GradientThreshold",
    )
    gradient_threshold_method: str = option(
        "l2norm",
        one_of("l2norm", "global-l2norm", "absolute-value"),
        "what the threshold is for: the norm of each learnable's gradient, that of all of them "
        "together, or each number by itself",
        resume="fixed",
        matlab="GradientThresholdMethod",
    )
