"""Options of training for validation and for metrics."""

import math
from typing import Literal

from mpidl.options.declaration import Rule, at_least, choice, fraction, option, options_class

# Names of metrics. `class_metrics` defines the metrics of each of these groups.
OF_COUNTS = ("balanced-accuracy", "precision", "recall", "f1", "iou", "dice")
OF_LABELS = ("subset-accuracy", "f1-micro", "f1-samples")
OF_RANKING = ("roc-auc", "average-precision")
NAMES = (*OF_COUNTS, *OF_LABELS, *OF_RANKING)
ALL = "all"


@options_class(group="Validation", resume="fixed")
class ValidationOptions:
    """The options of `TrainingOptions` for validation and metrics."""

    validation_fraction: float = option(
        fraction(),
        "Fraction of the training set, taken from each class, to hold out for validation",
        default=0.0,
        matlab="splitEachLabel",
    )
    fold: str | None = option(
        Rule(
            str,
            "I/K, such as 1/5 for the first of five folds",
            pattern=r"[1-9][0-9]{0,4}/[1-9][0-9]{0,4}",
            metavar="I/K",
            optional=True,
        ),
        "Cross-validation: divide the training set into K folds with the same mix of classes, "
        "validate on fold I and train on the others",
        default=None,
        matlab="cvpartition",
    )
    validation_frequency: int = option(
        at_least(0),
        "Iterations between validations, if there are validation images; 0 validates at the end "
        "of each epoch",
        default=50,
        matlab="ValidationFrequency",
    )
    validation_patience: float = option(
        at_least(1, allow_inf=True),
        "Stop after this many validations in a row without a new minimum of the validation loss",
        default=math.inf,
        resume="up",
        matlab="ValidationPatience",
    )
    output_network: Literal["last-iteration", "best-validation"] = choice(
        "Network that training returns: the network of the last iteration, or the network with the "
        "lowest validation loss",
        default="last-iteration",
        matlab="OutputNetwork",
    )
    metrics: str | None = option(
        Rule(
            str,
            f"{ALL}, or names of {', '.join(NAMES)}",
            choices=(ALL,),
            pattern=rf"({'|'.join(NAMES)})(,({'|'.join(NAMES)}))*",
            metavar="NAME,NAME,...",
            optional=True,
        ),
        "Per-class or per-label metrics to record at each validation, and to print and write at "
        "the end, or all for every metric that applies to the loss",
        default=None,
        group="Run and results",
        resume="free",
    )
