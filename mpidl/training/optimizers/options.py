"""Options of training that select and change the optimizer.

The names of options are the names of the arguments of solvers and transforms, which have the same
rules. In help texts, {solvers} stands for the names of the solvers that use the option.
"""

import math
from typing import Any, Literal

from mpidl.options.declaration import (
    Rule,
    check_value,
    choice,
    declared,
    fraction,
    option,
    options_class,
    positive,
    rule_of,
)


@options_class(group="Solver", resume="fixed")
class SolverOptions:
    """The options of `TrainingOptions` for the steps of the solver."""

    learning_rate: float | None = option(
        positive(optional=True),
        "Initial learning rate",
        default=None,
        matlab="InitialLearnRate",
    )
    momentum: float = option(
        fraction(),
        "Fraction of the previous step that is added to the current step ({solvers})",
        default=0.9,
        matlab="Momentum",
    )
    nesterov: Literal["on", "off"] | bool = choice(
        "Nesterov momentum ({solvers}): evaluate the gradient after the momentum step",
        default="off",
    )
    gradient_decay_factor: float = option(
        fraction(),
        "Decay of the moving mean of the gradient ({solvers})",
        default=0.9,
        matlab="GradientDecayFactor",
    )
    squared_gradient_decay_factor: float | None = option(
        fraction(optional=True),
        "Decay of the moving mean of the squared gradient ({solvers})",
        default=None,
        matlab="SquaredGradientDecayFactor",
    )
    epsilon: float = option(
        positive(),
        "Constant added to the denominator of a step ({solvers})",
        default=1e-8,
        matlab="Epsilon",
    )
    trust_coefficient: float = option(
        positive(),
        "Trust coefficient: the learning rate of each layer is multiplied by this factor and by "
        "the ratio of weight norm to gradient norm ({solvers})",
        default=0.001,
    )


@options_class(group="Solver", resume="fixed")
class DecayOptions:
    """The options of `TrainingOptions` for weight decay."""

    l2: float | None = option(
        Rule(float, "at least 0", 0),
        "L2 regularization factor ({decoupled}: decoupled weight decay, which is not clipped); "
        "--decay-exclude selects where it applies",
        default=None,
        matlab="L2Regularization",
    )
    decay_exclude: Literal["biases-and-norms", "biases", "none"] = choice(
        "Learnables without L2 regularization: biases and the parameters of normalization layers, "
        "only biases, or none",
        default="biases-and-norms",
        matlab="BiasL2Factor, ScaleL2Factor, OffsetL2Factor",
    )


@options_class(group="Solver", resume="fixed")
class ClipOptions:
    """The options of `TrainingOptions` for clipping gradients."""

    gradient_threshold: float = option(
        positive(allow_inf=True),
        "Clip gradients, including their L2 regularization term, to this value; inf disables "
        "clipping",
        default=math.inf,
        matlab="GradientThreshold",
    )
    gradient_threshold_method: Literal["l2norm", "global-l2norm", "absolute-value"] = choice(
        "What to clip: the norm of each learnable's gradient (l2norm), the norm of all gradients "
        "together (global-l2norm), or each element (absolute-value)",
        default="l2norm",
        matlab="GradientThresholdMethod",
    )


DECLARED = declared(SolverOptions) | declared(DecayOptions) | declared(ClipOptions)


def check(name: str, value: object) -> Any:
    """Return an argument of a solver or transform, converted; raise UserError if it is invalid."""
    return check_value(rule_of(DECLARED[name])._replace(optional=False), value, name)
