"""Options of training that select and change the loss."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from mpidl.options.declaration import (
    Rule,
    check_value,
    choice,
    declared,
    fraction,
    option,
    options_class,
    rule_of,
)

_NUMBER = r"[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?"  # pattern of a number >= 0


def _weights(noun: str) -> Rule:
    """Return the rule for "balanced", or a number per class or label."""
    return Rule(
        str,
        f"balanced, or a number >= 0 per {noun} such as 1,2,0.5",
        choices=("balanced",),
        pattern=rf"{_NUMBER}(,{_NUMBER})*",
        separator=",",
        optional=True,
    )


@options_class(group="Solver", resume="fixed")
class LossOptions:
    """The options of `TrainingOptions` for the loss."""

    loss: (
        Literal[
            "crossentropy",
            "binary-crossentropy",
            "dice",
            "crossentropy+dice",
            "tversky",
            "mse",
            "mae",
        ]
        | Callable[..., Any]
    ) = choice(
        "Loss to minimize: cross-entropy of labels (one per image or per pixel), binary "
        "cross-entropy of targets 0 and 1 (several labels per image), Dice or Tversky loss of the "
        "labels of pixels, or mean squared or mean absolute error of targets; in Python also a "
        "function of network, images and targets",
        default="crossentropy",
        matlab="lossFcn of trainnet; classificationLayer, regressionLayer",
    )
    class_weights: str | Sequence[float] | None = option(
        _weights("class"),
        "Weight of each class in the cross-entropy, Dice or Tversky loss, or balanced to give each "
        "class the same total weight in the training set, counted over images or pixels",
        default=None,
        matlab="ClassWeights",
    )
    positive_weights: str | Sequence[float] | None = option(
        _weights("label"),
        "Factor of the positive targets of each label in the binary cross-entropy, or balanced for "
        "the ratio of negative to positive targets in the training set",
        default=None,
    )
    label_smoothing: float = option(
        fraction(),
        "Fraction of the target probability that the cross-entropy spreads evenly over all classes",
        default=0.0,
    )
    ignore_label: int | None = option(
        Rule(int, "a whole number", optional=True),
        "Label that the cross-entropy and the accuracy ignore, such as 255 for unlabelled pixels",
        default=None,
    )
    focal_gamma: float = option(
        Rule(float, "at least 0", 0),
        "Exponent of the focal loss, which reduces the weight of labels that are already likely; "
        "with 0, the loss is the cross-entropy",
        default=0.0,
        matlab="Gamma of focalCrossEntropy",
    )


def check(name: str, value: object) -> None:
    """Raise UserError if an argument of a loss has a value that the option does not accept."""
    check_value(rule_of(declared(LossOptions)[name]), value, name)
