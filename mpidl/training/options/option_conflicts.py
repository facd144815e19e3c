"""Refuse options of a run that cannot be combined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidl.errors import UserError
from mpidl.options.declaration import flag

if TYPE_CHECKING:
    from mpidl.training.options.training_options import TrainingOptions

# Pairs of options that exclude each other.
EXCLUSIVE = (
    ("warmup_iterations", "warmup_epochs"),
    ("linear_scaling", "scale_rate"),
    ("fold", "validation_fraction"),
)


def check_conflicts(options: TrainingOptions) -> None:
    """Raise a UserError if the values of two options contradict each other."""
    for pair in EXCLUSIVE:
        first, second = (f"{flag(name)} {getattr(options, name)}" for name in pair)
        if all(getattr(options, name) for name in pair):
            raise UserError(f"{first} and {second}: expected at most one of them")
    changes = ("warmup_iterations", "warmup_epochs", "linear_scaling", "scale_rate")
    if callable(options.learn_rate_schedule) and any(getattr(options, name) for name in changes):
        raise UserError(
            "learn_rate_schedule is a function, which sets the rate of every iteration; it "
            "cannot be combined with warm-up or scaling"
        )
    if options.average_start is not None and options.average_start > options.epochs:
        raise UserError(
            f"--average-start {options.average_start}: expected at most --epochs "
            f"{options.epochs}, or the average would never begin"
        )
    if options.fold is not None:
        number, count = map(int, options.fold.split("/"))
        if not (number <= count and count >= 2):
            raise UserError(
                f"--fold {options.fold}: expected I/K with 1 <= I <= K and at least 2 folds"
            )
    _check_sampling(options)
    _check_certificate(options)
    if options.on_lost_rank == "shrink":
        _check_shrink(options)


def _check_sampling(options):
    """Raise UserError if another option conflicts with the option `sampling`."""
    if options.sampling == "partition" and options.worker_load == "measured":
        raise UserError(
            "--sampling partition and --worker-load measured: each rank's images would depend "
            "on timing; give numbers instead"
        )
    loss = options.loss_with_options()  # also checks the options of the loss
    if options.sampling != "balanced":
        return
    if options.shuffle == "never":
        raise UserError("--sampling balanced and --shuffle never: expected a random order")
    if getattr(loss, "is_balanced", False):
        name = "positive" if hasattr(loss, "positive_weights") else "class"
        raise UserError(
            f"--sampling balanced and --{name}-weights balanced: expected at most one of them, "
            "because each gives all classes the same weight; numbers are allowed"
        )


def _check_shrink(options):
    """Raise UserError if another option prevents a run from continuing on fewer ranks."""
    numbers = options.worker_load not in (None, "measured")
    load = f"--worker-load {options.worker_load}" if numbers else ""
    text = _rank_dependent(options) or load
    if text:
        raise UserError(
            f"--on-lost-rank shrink and {text}: expected options that suit any number of ranks"
        )


def _check_certificate(options):
    """Raise UserError if another option contradicts the options of the certificate."""
    if options.certify == "none":
        if options.certify_key is not None:
            raise UserError(f"--certify-key {options.certify_key}: expected --certify with it")
        return
    text = _rank_dependent(options)
    if options.batch_per_rank is not None:
        text = f"--batch-per-rank {options.batch_per_rank}"
    if text:
        raise UserError(
            f"--certify {options.certify} and {text}: the weights would depend on the number of "
            "ranks, so an audit could not replay the run on another number"
        )


def _rank_dependent(options):
    """Return an option with which the weights depend on the number of ranks, or ""."""
    pairs = ("batchnorm", "local"), ("sampling", "partition")
    options_in_use = [f"{flag(n)} {value}" for n, value in pairs if getattr(options, n) == value]
    return options_in_use[0] if options_in_use else ""
