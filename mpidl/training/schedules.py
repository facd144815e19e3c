"""Learning rate schedules.

The rates are the same on every machine. Only operations that IEEE 754 defines to the last bit are
used, because C libraries round cos() and pow() differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal

from mpidl.errors import UserError
from mpidl.training.options.training_options import TrainingOptions

ENDING = ("cosine", "polynomial")  # schedules that end with the last epoch


def rate_of(options: TrainingOptions, epoch: int, iteration: int, per_epoch: int) -> float:
    """Return the learning rate of an iteration.

    Parameters
    ----------
    options : TrainingOptions
        The schedule and its parameters.
    epoch : int
        From 1.
    iteration : int
        From 1, over all epochs.
    per_epoch : int
        Iterations per epoch.

    Raises
    ------
    UserError
        If the user's schedule function does not return a finite number of at least 0.
    """
    schedule = options.learn_rate_schedule
    if callable(schedule):
        return _call_schedule(schedule, epoch, iteration)
    rate = options.learning_rate
    if options.scale_rate is not None:
        rate *= options.batch_size / options.scale_rate
    warm = options.warmup_iterations or options.warmup_epochs * per_epoch
    if iteration <= warm:
        start = options.warmup_factor
        return rate * (start + (1 - start) * ((iteration - 1) / warm))
    if schedule == "none":
        return rate
    if schedule == "piecewise":
        for _ in range((epoch - 1) // options.learn_rate_drop_period):
            rate *= options.learn_rate_drop_factor
        return rate
    # Share of the iterations after the warm-up that are done, below 1.
    progress = (iteration - 1 - warm) / max(options.epochs * per_epoch - warm, iteration - warm)
    if schedule == "cosine":
        factor = (1 + cosine(progress)) / 2
    else:
        factor = float(Decimal(1 - progress) ** Decimal(options.learn_rate_power))
    final = options.learn_rate_final_factor
    return rate * (final + (1 - final) * factor)


def cosine(turn: float) -> float:
    """Return cos(pi * turn) for turn from 0 to 1."""
    if turn > 0.5:
        return -cosine(1 - turn)
    if turn > 0.25:  # cos x = sin(pi/2 - x)
        return _series(math.pi * (0.5 - turn), first=1)
    return _series(math.pi * turn, first=0)


def _series(x, first):
    """Sum the Taylor series of cos (first 0) or sin (first 1) at 0 <= x <= pi / 4, to 1e-17."""
    total = 0.0
    for n in range(first + 18, first, -2):
        total = (1 + total) * (-x * x / (n * (n - 1)))
    return (1 + total) * (x if first else 1.0)


def _call_schedule(schedule: Callable[[int, int], float], epoch: int, iteration: int) -> float:
    """Return the rate that the user's function gives for an iteration, checked."""
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
