"""Compute the learning rate of each iteration.

The rates are the same on every machine. C libraries round cos() and pow() differently, so this
module uses only the basic operations of IEEE 754 and Python's `decimal`.
"""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Literal

from mpidl.errors import UserError
from mpidl.options.declaration import (
    at_least,
    choice,
    factor,
    fraction,
    number_list,
    option,
    options_class,
    positive,
)

if TYPE_CHECKING:
    from mpidl.training.options.training_options import TrainingOptions

SCALING_EPOCHS = 5  # length of the warm-up in Goyal et al., "Accurate, large minibatch SGD", 2017
ENDING = ("cosine", "polynomial")  # schedules that depend on the number of epochs


@options_class(group="Learning rate schedule", resume="fixed")
class ScheduleOptions:
    """The options of `TrainingOptions` for the learning rate of each iteration."""

    scale_rate: int | None = option(
        at_least(1, optional=True),
        "Batch size for which the learning rate is intended; the rate is multiplied by the batch "
        "size divided by this number",
        default=None,
        group="Solver",
        matlab="0.1*miniBatchSize/256",
    )
    linear_scaling: int | None = option(
        at_least(1, optional=True),
        "Like --scale-rate, with a warm-up for large batches: the rate rises from its unscaled "
        "value during 5 epochs, or during --warmup-epochs if set",
        default=None,
        group="Solver",
    )
    learn_rate_schedule: (
        Literal["none", "piecewise", "cosine", "polynomial"] | Callable[[int, int], float]
    ) = choice(
        "How the learning rate decreases: not at all (none), in drops (piecewise), or with every "
        "iteration until the end of the last epoch (cosine, polynomial); in Python also a function "
        "of epoch and iteration, both counted from 1",
        default="none",
        matlab="LearnRateSchedule",
    )
    learn_rate_drop_factor: float = option(
        factor(),
        "Factor by which each drop multiplies the learning rate (piecewise)",
        default=0.1,
        matlab="LearnRateDropFactor",
    )
    learn_rate_drop_period: int = option(
        at_least(1),
        "Epochs between drops (piecewise)",
        default=10,
        matlab="LearnRateDropPeriod",
    )
    learn_rate_drop_epochs: str | int | Sequence[int] | None = option(
        number_list("epochs such as 30,60,80"),
        "Epochs after which the learning rate drops, such as 30,60,80, instead of every "
        "--learn-rate-drop-period epochs (piecewise)",
        default=None,
    )
    learn_rate_power: float = option(
        positive(),
        "Exponent applied to the fraction of iterations that remain (polynomial)",
        default=1.0,
        matlab="polynomialLearnRate(Power)",
    )
    learn_rate_final_factor: float = option(
        fraction(),
        "Fraction of the learning rate that remains at the end (cosine, polynomial)",
        default=0.0,
        matlab="FinalFactor",
    )
    warmup_iterations: int = option(
        at_least(0),
        "Iterations during which the learning rate rises to the start of the schedule",
        default=0,
        matlab='"warmup"',
    )
    warmup_epochs: int = option(
        at_least(0),
        "Epochs during which the learning rate rises to the start of the schedule",
        default=0,
        matlab='warmupLearnRate(FrequencyUnit="epoch")',
    )
    warmup_factor: float = option(
        factor(),
        "Fraction of the learning rate at which a warm-up starts",
        default=0.1,
        matlab="warmupLearnRate(InitialFactor)",
    )


def rate_of(options: "TrainingOptions", epoch: int, iteration: int, per_epoch: int) -> float:
    """Return the learning rate of an iteration.

    Parameters
    ----------
    options : TrainingOptions
        The schedule and its parameters.
    epoch : int
        The epoch, counted from 1.
    iteration : int
        The iteration, counted from 1 over all epochs.
    per_epoch : int
        Number of iterations per epoch.

    Raises
    ------
    UserError
        If a schedule function returns something other than a finite number of at least 0.
    """
    schedule = options.learn_rate_schedule
    if callable(schedule):
        return _call_schedule(schedule, epoch, iteration)
    rate = options.learning_rate
    assert rate is not None  # TrainingOptions has replaced None by the solver's rate
    base = options.scale_rate or options.linear_scaling
    if base is not None:
        rate *= options.batch_size / base
    start, warm = options.warmup_factor, options.warmup_iterations
    warm = warm or options.warmup_epochs * per_epoch
    if options.linear_scaling is not None and options.linear_scaling < options.batch_size:
        start = options.linear_scaling / options.batch_size
        warm = warm or SCALING_EPOCHS * per_epoch
    if iteration <= warm:
        return rate * (start + (1 - start) * ((iteration - 1) / warm))
    if schedule == "none":
        return rate
    if schedule == "piecewise":
        drops = (epoch - 1) // options.learn_rate_drop_period
        if options.learn_rate_drop_epochs is not None:
            drops = sum(
                epoch > int(last) for last in str(options.learn_rate_drop_epochs).split(",")
            )
        for _ in range(drops):
            rate *= options.learn_rate_drop_factor
        return rate
    # Fraction of the iterations after the warm-up that are complete; always below 1.
    progress = (iteration - 1 - warm) / max(options.epochs * per_epoch - warm, iteration - warm)
    if schedule == "cosine":
        factor = (1 + cosine(progress)) / 2
    else:
        factor = float(Decimal(1 - progress) ** Decimal(options.learn_rate_power))
    final = options.learn_rate_final_factor
    return rate * (final + (1 - final) * factor)


def cosine(turn: float) -> float:
    """Return cos(pi * turn) for 0 <= turn <= 1."""
    if turn > 0.5:
        return -cosine(1 - turn)
    if turn > 0.25:  # cos x = sin(pi/2 - x)
        return _series(math.pi * (0.5 - turn), first=1)
    return _series(math.pi * turn, first=0)


def _series(x, first):
    """Return cos(x) if `first` is 0, or sin(x) if `first` is 1, from the Taylor series.

    The error of the series is below 1e-17 for 0 <= x <= pi / 4.
    """
    total = 0.0
    for n in range(first + 18, first, -2):
        total = (1 + total) * (-x * x / (n * (n - 1)))
    return (1 + total) * (x if first else 1.0)


def _call_schedule(schedule: Callable[[int, int], float], epoch: int, iteration: int) -> float:
    """Call the user's schedule function, check the learning rate, and return it."""
    rate = schedule(epoch, iteration)
    try:
        number = float(rate)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UserError(
            f"learn_rate_schedule: expected a learning rate for epoch {epoch}, iteration "
            f"{iteration}, found {rate}"
        )
    return number
