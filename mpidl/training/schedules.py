"""The learning rate of each iteration.

The same numbers everywhere: only operations that IEEE 754 fixes to the last bit, because C
libraries round cos() and pow() each in its own way.
"""

import math
from decimal import Decimal

from mpidl.errors import UserError

ENDING = ("cosine", "polynomial")  # which end with the last epoch


def rate_of(known, epoch, iteration, per_epoch):
    """The learning rate of an iteration, by TrainingOptions.

    epoch, iteration: from 1, the latter over all epochs; per_epoch: iterations in an epoch. Raises
    UserError where a function of the user's gives no rate.
    """
    schedule = known.learn_rate_schedule
    if callable(schedule):
        return _asked(schedule, epoch, iteration)
    rate = known.learning_rate
    if known.scale_rate is not None:
        rate *= known.batch_size / known.scale_rate
    warm = known.warmup_iterations or known.warmup_epochs * per_epoch
    if iteration <= warm:
        start = known.warmup_factor
        return rate * (start + (1 - start) * ((iteration - 1) / warm))
    if schedule == "none":
        return rate
    if schedule == "piecewise":
        for _ in range((epoch - 1) // known.learn_rate_drop_period):
            rate *= known.learn_rate_drop_factor
        return rate
    # the share of the iterations that was done, those of the warm-up not counted; below 1
    done = (iteration - 1 - warm) / max(known.epochs * per_epoch - warm, iteration - warm)
    if schedule == "cosine":
        left = (1 + cosine(done)) / 2
    else:
        left = float(Decimal(1 - done) ** Decimal(known.learn_rate_power))
    final = known.learn_rate_final_factor
    return rate * (final + (1 - final) * left)


def cosine(turn):
    """cos(pi * turn) for turn from 0 to 1."""
    if turn > 0.5:
        return -cosine(1 - turn)
    if turn > 0.25:  # as a sine
        return _series(math.pi * (0.5 - turn), first=1)
    return _series(math.pi * turn, first=0)


def _series(x, first):
    """The Taylor series of cos (first 0) or sin (first 1) at 0 <= x <= pi / 4, to 1e-17."""
    total = 0.0
    for n in range(first + 18, first, -2):
        total = (1 + total) * (-x * x / (n * (n - 1)))
    return (1 + total) * (x if first else 1.0)


def _asked(schedule, epoch, iteration):
    """What a function of the user's gives for an iteration."""
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
