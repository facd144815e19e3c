"""Define the transforms and the fused steps of Adam and AdamW."""

from __future__ import annotations

import math

from mpidl.training.optimizers.chain import FusedTail, fuses
from mpidl.training.optimizers.transforms import (
    Arrays,
    Numbers,
    Rate,
    Transform,
    Updates,
    WeightDecay,
    check,
)

__all__ = ["AdamMoments", "CorrectedAdamMoments"]


class AdamMoments(Transform):
    """Compute Adam's direction: the mean gradient divided by the root mean square gradient.

        m <- gradient_decay * m + (1 - gradient_decay) * g
        v <- square_decay * v + (1 - square_decay) * g^2
        direction = correction * m / (sqrt(v) + epsilon)

    where correction = sqrt(1 - square_decay^t) / (1 - gradient_decay^t) in training step t, counted
    from 1. The formulas are algorithm 1 of Kingma and Ba, "Adam: a method for stochastic
    optimization", 2015, in the order of computation given at the end of section 2 of that paper.
    MATLAB uses the same formulas. PyTorch adds epsilon after correcting v; the results agree if
    epsilon is much smaller than sqrt(v).

    Parameters
    ----------
    gradient_decay, square_decay : float
        Factors, at least 0 and below 1, by which m and v decay in each step.
    epsilon : float
        A small number added to the square root in the denominator.
    """

    tables = ("mean", "square")

    def __init__(
        self, gradient_decay: float = 0.9, square_decay: float = 0.999, epsilon: float = 1e-8
    ) -> None:
        self.gradient_decay: float = check("gradient_decay_factor", gradient_decay)
        self.square_decay: float = check("squared_gradient_decay_factor", square_decay)
        self.epsilon: float = check("epsilon", epsilon)

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"correction": self._correction(-1.0, step)}

    def _correction(self, rate, step):
        """Return rate * correction: the factor of m / (sqrt(v) + epsilon) in a training step."""
        mean = 1 - power(self.gradient_decay, step)
        square = 1 - power(self.square_decay, step)
        return rate * math.sqrt(square) / mean

    def _arguments(self, rate, epsilon):
        """Return the arguments of the formula "adam"; the rate includes the correction."""
        mean, square = self.gradient_decay, self.square_decay
        return [rate, mean, 1 - mean, square, 1 - square, epsilon]

    def apply(self, updates: Updates, state_arrays: Arrays, numbers: Numbers) -> None:
        arguments = self._arguments(numbers["correction"], numbers.get("epsilon", self.epsilon))
        updates.arrays = updates.stepped_zeros("adam", state_arrays, arguments)


class CorrectedAdamMoments(AdamMoments):
    """Compute Adam's direction with epsilon added to the corrected square root, like PyTorch.

        direction = m_hat / (sqrt(v_hat) + epsilon)

    where m_hat = m / (1 - gradient_decay^t) and v_hat = v / (1 - square_decay^t) in training step
    t. This formula is algorithm 1 of Kingma and Ba. `AdamMoments` computes the same direction if
    its epsilon is replaced by epsilon * sqrt(1 - square_decay^t).
    """

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"correction": self._correction(-1.0, step), "epsilon": self._epsilon(step)}

    def _epsilon(self, step):
        """Return the epsilon that a training step adds to the uncorrected root sqrt(v)."""
        return self.epsilon * math.sqrt(1 - power(self.square_decay, step))


@fuses(AdamMoments, Rate)
class _AdamRate(FusedTail):
    """A step of Adam, computed by one kernel."""

    transforms: tuple[AdamMoments, Rate]
    formula = "adam"
    tables = AdamMoments.tables

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"learning_rate": self.transforms[0]._correction(learning_rate, step)}

    def arguments(self, values):
        moments = self.transforms[0]
        return moments._arguments(values["learning_rate"], moments.epsilon)


@fuses(CorrectedAdamMoments, WeightDecay, Rate)
class _AdamWRate(FusedTail):
    """A step of AdamW, computed by one kernel."""

    transforms: tuple[CorrectedAdamMoments, WeightDecay, Rate]
    formula = "adamw"
    tables = CorrectedAdamMoments.tables

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        moments = self.transforms[0]
        correction, epsilon = moments._correction(1.0, step), moments._epsilon(step)
        return {"learning_rate": learning_rate, "correction": correction, "epsilon": epsilon}

    def arguments(self, values):
        numbers = self.transforms[0]._arguments(values["learning_rate"], values["epsilon"])
        return [*numbers, values["correction"]]

    def step(self, updates, state_arrays, values):
        # Add the pending decays to the gradients, then set the decay that the kernel adds.
        self.transforms[1].apply(updates, [], {})
        return super().step(updates, state_arrays, values)


def power(base: float, exponent: int) -> float:
    """Return base ** exponent, computed with multiplications only.

    The result of pow() would depend on the machine, because C libraries round it differently.
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result
