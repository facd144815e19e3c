"""Read the ranges and the lists of values from which a sweep draws options."""

import math
import numbers
from collections.abc import Iterable
from typing import Any, NamedTuple

from mpidl.errors import UserError
from mpidl.text import did_you_mean

KINDS = ("uniform", "log_uniform", "integers", "choices")
STEP = "step"
DIGITS = 6  # significant digits of random numbers; later digits depend on the C library
STEP_DIGITS = 15  # of multiples of a step, such as 0.3 instead of 0.30000000000000004
LARGEST = 1e100  # of bounds, whose difference must be a float
MOST_STEPS = 2**53  # a float counts no further


class Range(NamedTuple):
    """The values that an option may have in the trials of a sweep.

    `kind` is one of `KINDS`. Choices have only `values`, the other kinds have bounds, which are
    included. With `step`, the values are `low`, `low + step` and so on.
    """

    kind: str
    low: Any = None
    high: Any = None
    step: Any = None
    values: tuple[Any, ...] = ()

    def draw(self, number: float) -> Any:
        """Map a number in [0, 1) to a value."""
        low, high = self.low, self.high
        if self.kind == "choices":
            return self.values[int(number * len(self.values))]
        if self.kind == "integers":
            step = self.step or 1
            return low + step * int(number * ((high - low) // step + 1))
        if self.step is not None:
            return self.rounded(low + self.step * int(number * (self._steps() + 1)))
        if self.kind == "uniform":
            return self.rounded(low + number * (high - low))
        return self.rounded(low * math.exp(number * math.log(high / low)))

    def rounded(self, value: float) -> float:
        """Round a number between the bounds to the digits that a sweep writes."""
        digits = DIGITS if self.step is None else STEP_DIGITS
        return min(max(float(f"{value:.{digits}g}"), self.low), self.high)

    def samples(self) -> Iterable[Any]:
        """Return values that an option's rule must accept: all choices, or bounds and a third."""
        if self.kind == "choices":
            return self.values
        return self.draw(0.0), self.draw(1 / 3), self.draw(1 - 2**-53)

    def _steps(self):
        return round((self.high - self.low) / self.step)


def read(value: Any, spelled: str) -> Range:
    """Return the range that the value of a key describes; raise UserError if it is invalid."""
    if isinstance(value, list):
        value = {"choices": value}
    described = dict(value) if isinstance(value, dict) else {}
    step = described.pop(STEP, None)
    if len(described) != 1:
        raise UserError(
            f"{spelled} must be a list of choices or one of {{ {' = ..., '.join(KINDS)} = ... }}, "
            f"found {value}"
        )
    ((kind, values),) = described.items()
    kind = kind.replace("-", "_")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or f": expected {', '.join(KINDS)}"
        raise UserError(f"{spelled}: unknown distribution {kind}{hint}")
    if kind == "choices":
        if not isinstance(values, list) or not values:
            raise UserError(f"{spelled}: choices must be a list of values, found {values}")
        choices = Range(kind, values=tuple(values))
    else:
        choices = Range(kind, *_bounds(kind, values, spelled))
    return choices if step is None else choices._replace(step=_checked_step(choices, step, spelled))


def _bounds(kind, values, spelled):
    """Return the two bounds of a range of numbers."""
    is_pair = isinstance(values, list) and len(values) == 2
    is_pair = is_pair and all(_is_number(value, kind) for value in values)
    if not is_pair or values[0] > values[1] or (kind == "log_uniform" and values[0] <= 0):
        positive = "positive " if kind == "log_uniform" else ""
        noun = "whole numbers" if kind == "integers" else "numbers"
        raise UserError(
            f"{spelled}: {kind} must be two {positive}{noun}, the lowest and the highest, "
            f"found {values}"
        )
    return values


def _checked_step(choices, step, spelled):
    """Return the step of a range, which must divide the range."""
    if choices.kind not in ("uniform", "integers"):
        raise UserError(
            f"{spelled}: {STEP} must belong to uniform or integers, found {choices.kind}"
        )
    if not _is_number(step, choices.kind) or step <= 0:
        noun = "whole number" if choices.kind == "integers" else "number"
        raise UserError(f"{spelled}: {STEP} must be a positive {noun}, found {step}")
    count = (choices.high - choices.low) / step
    if count > MOST_STEPS or abs(count - round(count)) > 1e-9 * max(count, 1):
        raise UserError(
            f"{spelled}: {STEP} must divide the range from {choices.low} to {choices.high}, found "
            f"{step}"
        )
    return step


def _is_number(value, kind):
    number = numbers.Integral if kind == "integers" else numbers.Real
    is_number = isinstance(value, number) and not isinstance(value, bool)
    return is_number and -LARGEST <= value <= LARGEST
