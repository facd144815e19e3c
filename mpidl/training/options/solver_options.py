"""Options for the length of training, loss, solver, learning rate and gradient clipping.

This module does not import `annotations` from `__future__`, so that help() shows the types.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from mpidl.data.datastore import Datastore
from mpidl.losses import LOSSES, TAKERS, LabelLoss, loss_with_options
from mpidl.training.optimizers import SOLVERS, SolverName
from mpidl.training.optimizers.sgdm import NESTEROV
from mpidl.training.optimizers.transforms import RULES
from mpidl.training.options.option_types import (
    Rule,
    at_least,
    factor,
    fraction,
    one_of,
    option,
    options_class,
    positive,
)

if TYPE_CHECKING:
    from mpidl.nn import Network

NUMBER = r"[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?"  # pattern of a number >= 0

# Defaults that depend on the solver: {option: {solver: value}}.
BY_SOLVER: dict[str, dict[str, float]] = {
    option: {name: cls.defaults[option] for name, cls in SOLVERS.items() if option in cls.defaults}
    for option in sorted({option for cls in SOLVERS.values() for option in cls.defaults})
}


def _takers(option: str) -> str:
    """Return the names of the solvers that use an option, such as "adam, rmsprop"."""
    return ", ".join(name for name, cls in SOLVERS.items() if cls.takes(option))


def _decoupled() -> str:
    """Return a remark for help texts that lists the solvers with decoupled weight decay."""
    names = ", ".join(name for name, cls in SOLVERS.items() if cls.decouples_decay)
    return f" ({names}: decoupled weight decay, which is not clipped)" if names else ""


def _titles() -> str:
    """Return the titles of all solvers as text, such as "SGD with momentum, Adam or RMSProp"."""
    *titles, last = (cls.title for cls in SOLVERS.values())
    return f"{', '.join(titles)} or {last}"


@options_class
class SolverOptions:
    """The options of `TrainingOptions` for the length of training, the loss and the solver."""

    epochs: int = option(
        at_least(1),
        "Number of passes over the training set",
        default=30,
        resume="up",
        matlab="MaxEpochs",
    )
    max_iterations: int | None = option(
        at_least(1, optional=True),
        "Stop after this many mini-batches in total, including those before a resume",
        default=None,
    )
    batch_size: int = option(
        at_least(1),
        "Images per mini-batch, summed over all ranks",
        default=128,
        resume="fixed",
        matlab="MiniBatchSize",
    )
    batch_per_rank: int | None = option(
        at_least(1, optional=True),
        "Images per mini-batch on each rank; sets the batch size to this number times the number "
        "of ranks (the weights then depend on the number of ranks)",
        default=None,
        matlab="miniBatchSize*N",
    )
    accumulate: int = option(
        at_least(1),
        "Compute each mini-batch in up to this many parts, one after another, to save memory; "
        "--batch-size counts the images of all parts, and batch-norm statistics are computed "
        "separately for each part",
        default=1,
        resume="fixed",
    )
    loss: (
        Literal["crossentropy", "binary-crossentropy", "dice", "crossentropy+dice", "mse", "mae"]
        | Callable[..., Any]
    ) = option(
        one_of(*LOSSES, allow_function=True),
        "Loss to minimize: cross-entropy of labels (one per image or per pixel), binary "
        "cross-entropy of targets 0 and 1 (several labels per image), Dice loss of the labels of "
        "pixels, or mean squared or mean absolute error of targets; in Python also a function of "
        "network, images and targets",
        default="crossentropy",
        resume="fixed",
        matlab="lossFcn of trainnet; classificationLayer, regressionLayer",
    )
    class_weights: str | Sequence[float] | None = option(
        Rule(
            str,
            "balanced, or a number >= 0 per class such as 1,2,0.5",
            choices=("balanced",),
            pattern=rf"{NUMBER}(,{NUMBER})*",
            separator=",",
            optional=True,
        ),
        "Weight of each class in the cross-entropy or the Dice loss, or balanced to give each "
        "class the same total weight in the training set, counted over images or pixels",
        default=None,
        resume="fixed",
        matlab="ClassWeights",
    )
    positive_weights: str | Sequence[float] | None = option(
        Rule(
            str,
            "balanced, or a number >= 0 per label such as 1,2,0.5",
            choices=("balanced",),
            pattern=rf"{NUMBER}(,{NUMBER})*",
            separator=",",
            optional=True,
        ),
        "Factor of the positive targets of each label in the binary cross-entropy, or balanced for "
        "the ratio of negative to positive targets in the training set",
        default=None,
        resume="fixed",
    )
    label_smoothing: float = option(
        fraction(),
        "Fraction of the target probability that the cross-entropy spreads evenly over all classes",
        default=0.0,
        resume="fixed",
    )
    ignore_label: int | None = option(
        Rule(int, "a whole number", optional=True),
        "Label that the cross-entropy and the accuracy ignore, such as 255 for unlabelled pixels",
        default=None,
        resume="fixed",
    )
    focal_gamma: float = option(
        Rule(float, "at least 0", 0),
        "Exponent of the focal loss, which reduces the weight of labels that are already likely; "
        "with 0, the loss is the cross-entropy",
        default=0.0,
        resume="fixed",
        matlab="Gamma of focalCrossEntropy",
    )
    solver: SolverName = option(
        one_of(*SOLVERS),
        f"Optimizer: {_titles()}",
        default="sgdm",
        resume="fixed",
        matlab="solverName",
    )
    learning_rate: float | None = option(
        RULES["learning_rate"]._replace(optional=True),
        "Initial learning rate",
        default=None,
        resume="fixed",
        matlab="InitialLearnRate",
    )
    momentum: float = option(
        RULES["momentum"],
        f"Fraction of the previous step that is added to the current step ({_takers('momentum')})",
        default=0.9,
        resume="fixed",
        matlab="Momentum",
    )
    nesterov: Literal["on", "off"] | bool = option(
        NESTEROV,
        f"Nesterov momentum ({_takers('nesterov')}): evaluate the gradient after the momentum step",
        default="off",
        resume="fixed",
    )
    gradient_decay_factor: float = option(
        RULES["gradient_decay_factor"],
        f"Decay of the moving mean of the gradient ({_takers('gradient_decay_factor')})",
        default=0.9,
        resume="fixed",
        matlab="GradientDecayFactor",
    )
    squared_gradient_decay_factor: float | None = option(
        RULES["squared_gradient_decay_factor"]._replace(optional=True),
        "Decay of the moving mean of the squared gradient "
        f"({_takers('squared_gradient_decay_factor')})",
        default=None,
        resume="fixed",
        matlab="SquaredGradientDecayFactor",
    )
    epsilon: float = option(
        RULES["epsilon"],
        f"Constant added to the denominator of a step ({_takers('epsilon')})",
        default=1e-8,
        resume="fixed",
        matlab="Epsilon",
    )
    trust_coefficient: float = option(
        RULES["trust_coefficient"],
        "Trust coefficient: the learning rate of each layer is multiplied by this factor and by "
        f"the ratio of weight norm to gradient norm ({_takers('trust_coefficient')})",
        default=0.001,
        resume="fixed",
    )
    scale_rate: int | None = option(
        at_least(1, optional=True),
        "Batch size for which the learning rate is intended; the rate is multiplied by the batch "
        "size divided by this number",
        default=None,
        resume="fixed",
        matlab="0.1*miniBatchSize/256",
    )
    linear_scaling: int | None = option(
        at_least(1, optional=True),
        "Like --scale-rate, with a warm-up for large batches: the rate rises from its unscaled "
        "value during 5 epochs, or during --warmup-epochs if set",
        default=None,
        resume="fixed",
    )
    learn_rate_schedule: (
        Literal["none", "piecewise", "cosine", "polynomial"] | Callable[[int, int], float]
    ) = option(
        one_of("none", "piecewise", "cosine", "polynomial", allow_function=True),
        "How the learning rate decreases: not at all (none), in drops (piecewise), or with every "
        "iteration until the end of the last epoch (cosine, polynomial); in Python also a function "
        "of epoch and iteration, both counted from 1",
        default="none",
        resume="fixed",
        matlab="LearnRateSchedule",
    )
    learn_rate_drop_factor: float = option(
        factor(),
        "Factor by which each drop multiplies the learning rate (piecewise)",
        default=0.1,
        resume="fixed",
        matlab="LearnRateDropFactor",
    )
    learn_rate_drop_period: int = option(
        at_least(1),
        "Epochs between drops (piecewise)",
        default=10,
        resume="fixed",
        matlab="LearnRateDropPeriod",
    )
    learn_rate_power: float = option(
        positive(),
        "Exponent applied to the fraction of iterations that remain (polynomial)",
        default=1.0,
        resume="fixed",
        matlab="polynomialLearnRate(Power)",
    )
    learn_rate_final_factor: float = option(
        fraction(),
        "Fraction of the learning rate that remains at the end (cosine, polynomial)",
        default=0.0,
        resume="fixed",
        matlab="FinalFactor",
    )
    warmup_iterations: int = option(
        at_least(0),
        "Iterations during which the learning rate rises to the start of the schedule",
        default=0,
        resume="fixed",
        matlab='"warmup"',
    )
    warmup_epochs: int = option(
        at_least(0),
        "Epochs during which the learning rate rises to the start of the schedule",
        default=0,
        resume="fixed",
        matlab='warmupLearnRate(FrequencyUnit="epoch")',
    )
    warmup_factor: float = option(
        factor(),
        "Fraction of the learning rate at which a warm-up starts",
        default=0.1,
        resume="fixed",
        matlab="warmupLearnRate(InitialFactor)",
    )
    l2: float | None = option(
        RULES["l2"],
        f"L2 regularization factor{_decoupled()}; --decay-exclude selects where it applies",
        default=None,
        resume="fixed",
        matlab="L2Regularization",
    )
    decay_exclude: Literal["biases-and-norms", "biases", "none"] = option(
        RULES["decay_exclude"],
        "Learnables without L2 regularization: biases and the parameters of normalization layers, "
        "only biases, or none",
        default="biases-and-norms",
        resume="fixed",
        matlab="BiasL2Factor, ScaleL2Factor, OffsetL2Factor",
    )
    average: Literal["none", "ema", "swa"] = option(
        one_of("none", "ema", "swa"),
        "Average of the weights: an exponential moving average over iterations (ema), or the mean "
        "of the weights at the ends of epochs (swa)",
        default="none",
        resume="fixed",
    )
    average_decay: float = option(
        fraction(),
        "Factor by which the moving average decays per update (ema)",
        default=0.999,
        resume="fixed",
    )
    average_start: int | None = option(
        at_least(1, optional=True),
        "Epoch with which the average starts; by default the first epoch (ema), or the epoch after "
        "three quarters of --epochs (swa)",
        default=None,
        resume="fixed",
    )
    average_every: int = option(
        at_least(0),
        "Iterations between updates of the average; 0 updates it after each iteration (ema) or "
        "epoch (swa)",
        default=0,
        resume="fixed",
    )
    average_use: Literal["average", "raw"] = option(
        one_of("average", "raw"),
        "If there is an average: weights to use for validation, for the test and in the trained "
        "network",
        default="average",
        resume="fixed",
    )
    gradient_threshold: float = option(
        RULES["gradient_threshold"],
        "Clip gradients, including their L2 regularization term, to this value; inf disables "
        "clipping",
        default=math.inf,
        resume="fixed",
        matlab="GradientThreshold",
    )
    gradient_threshold_method: Literal["l2norm", "global-l2norm", "absolute-value"] = option(
        RULES["gradient_threshold_method"],
        "What to clip: the norm of each learnable's gradient (l2norm), the norm of all gradients "
        "together (global-l2norm), or each element (absolute-value)",
        default="l2norm",
        resume="fixed",
        matlab="GradientThresholdMethod",
    )

    def loss_with_options(self) -> str | Callable[..., Any]:
        """Return the loss with its options, such as label smoothing, applied.

        Weights given as "balanced" are not resolved; see `loss_for`.

        Returns
        -------
        str or callable
            The option `loss` itself, or a loss object such as a `CrossEntropy`.

        Raises
        ------
        UserError
            If an option is set that the loss does not support.
        """
        options: dict[str, Any] = {name: getattr(self, name) for name in TAKERS}
        options = {n: value for n, value in options.items() if value != getattr(type(self), n)}
        for name in ("class_weights", "positive_weights"):
            if options.get(name, "balanced") != "balanced":
                options[name] = tuple(map(float, options[name].split(",")))
        return loss_with_options(self.loss, options)

    def loss_for(
        self, net: "Network", datastore: Datastore, world: Any = None
    ) -> str | Callable[..., Any]:
        """Return the loss with its options applied, for a training set. Collective.

        Parameters
        ----------
        net : Network
            The network.
        datastore : Datastore
            The training set, from which "balanced" weights are computed.
        world : World, optional
            The ranks that share the reading of targets. By default, this rank reads all targets.

        Returns
        -------
        str or callable
            The option `loss` itself, or a loss object such as a `CrossEntropy`.
        """
        loss = self.loss_with_options()
        if isinstance(loss, LabelLoss):
            return loss.for_images(datastore, net.output_shape[0], world)
        return loss


# Options that depend on the solver: the learning rate, and the options that only some solvers use.
SOLVER_NAMES = (
    "learning_rate",
    *(
        declared.name
        for declared in fields(SolverOptions)
        if 0 < sum(cls.takes(declared.name) for cls in SOLVERS.values()) < len(SOLVERS)
    ),
)
