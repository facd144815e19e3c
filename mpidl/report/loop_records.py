"""Convert the values that a custom training loop reports to records like those of metrics.jsonl."""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable, Mapping
from typing import Any

from mpidl.errors import UserError

TRAINING = ("loss", "accuracy", "learning_rate", "images_per_second")
VALIDATION = {"validation_loss": "loss", "validation_accuracy": "accuracy"}
RECORDED = {*TRAINING, *VALIDATION}


class LoopRecords:
    """A listener of `World.report` that passes records to a function.

    A report with `iteration` is a record of an iteration, and a report with only `epoch` is a
    record of an epoch. If a loop reports no iterations, its epochs are also its iterations, so that
    curves have points. A report with `validation_loss` or `validation_accuracy` is (also) a record
    of a validation. Reports without a position, and other values, are not recorded. A loop may
    count the iterations of each epoch anew. In the records, iterations always increase. `write`
    receives each record, a dict with the keys of metrics.jsonl.
    """

    def __init__(self, write: Callable[[dict[str, Any]], object]) -> None:
        self.write, self.start_time = write, time.monotonic()
        self.epoch, self.iteration = 1, 0
        self._skipped = 0  # iterations of earlier epochs, if the loop counts anew in each epoch
        self._has_iterations = False

    def __call__(self, facts: Mapping[str, Any]) -> set[str]:
        """Record a report, and return the names of the values that are recorded.

        Raises UserError if a position is not a whole number, or if another value to record is not a
        number.
        """
        if "epoch" not in facts and "iteration" not in facts:
            return set()
        training = {name: _number(facts, name) for name in TRAINING}
        is_training = any(name in facts for name in TRAINING)
        self._move(facts)
        if is_training and "iteration" in facts:
            self._record("iteration", training)
        elif is_training:
            if not self._has_iterations:
                self._record("iteration", training)
            self._record("epoch", training)
        if any(name in facts for name in VALIDATION):
            values = {short: _number(facts, name) for name, short in VALIDATION.items()}
            self._record("validation", dict.fromkeys(TRAINING) | values)
        return RECORDED & facts.keys()

    def _move(self, facts):
        """Set the epoch and the iteration of the next records."""
        epoch = _position(facts, "epoch") if "epoch" in facts else self.epoch
        if "iteration" in facts:
            iteration = _position(facts, "iteration") + self._skipped
            if epoch > self.epoch and self._has_iterations and iteration <= self.iteration:
                self._skipped += self.iteration + 1 - iteration
                iteration = self.iteration + 1
            self.iteration, self._has_iterations = iteration, True
        elif not self._has_iterations:
            self.iteration = epoch
        self.epoch = epoch

    def _record(self, kind, values):
        position = {"kind": kind, "epoch": self.epoch, "iteration": self.iteration}
        self.write({**position, **values, "seconds": time.monotonic() - self.start_time})


def _position(facts, name):
    value = facts[name]
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
        raise UserError(f"world.report: expected a whole number as {name}, found {value!r}")
    return int(value)


def _number(facts, name):
    """Return a value as a float, or None if the report does not have it."""
    value = facts.get(name)
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        kind = type(value).__name__
        hint = "; world.gplus adds up the ranks' parts" if kind == "Partial" else ""
        raise UserError(f"world.report: expected a number as {name}, found {kind}{hint}") from None
