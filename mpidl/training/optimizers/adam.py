"""Adam: its transform, the kernel that fuses it, and its solver."""

from __future__ import annotations

import math
from typing import Any

from mpidl.training.optimizers.chain import FusedTail, fuses
from mpidl.training.optimizers.solvers import Factors, Solver
from mpidl.training.optimizers.transforms import Clip, Rate, Transform, WeightDecay, check


class AdamMoments(Transform):
    """Divide the moving mean of the gradient by the root of that of its square.

        m <- gradient_decay * m + (1 - gradient_decay) * g
        v <- square_decay * v + (1 - square_decay) * g^2
        direction = correction * m / (sqrt(v) + epsilon)

    with correction = sqrt(1 - square_decay^t) / (1 - gradient_decay^t) in step t. Kingma and Ba,
    "Adam: a method for stochastic optimization", 2015, algorithm 1 with the order of computation of
    the end of its section 2, as in MATLAB. PyTorch adds epsilon after the correction of v: the same
    if epsilon is small beside sqrt(v).
    """

    tables = ("mean", "square")

    def __init__(
        self, gradient_decay: float = 0.9, square_decay: float = 0.999, epsilon: float = 1e-8
    ) -> None:
        self.gradient_decay = check("gradient_decay_factor", gradient_decay)
        self.square_decay = check("squared_gradient_decay_factor", square_decay)
        self.epsilon = check("epsilon", epsilon)

    def correction(self, rate: float, step: int) -> float:
        """Return rate * correction of a step."""
        mean = 1 - power(self.gradient_decay, step)
        square = 1 - power(self.square_decay, step)
        return rate * math.sqrt(square) / mean

    def numbers(self, learning_rate, step):
        return {"correction": self.correction(-1.0, step)}

    def arguments(self, rate: Any) -> list[Any]:
        """Return the numbers of the formula "adam" at a rate."""
        mean, square = self.gradient_decay, self.square_decay
        return [rate, mean, 1 - mean, square, 1 - square, self.epsilon]

    def apply(self, updates, state_arrays, numbers):
        arguments = self.arguments(numbers["correction"])
        updates.arrays = updates.stepped_zeros("adam", state_arrays, arguments)


@fuses(AdamMoments, Rate)
class _AdamRate(FusedTail):
    """Adam's step by one kernel."""

    formula = "adam"
    tables = AdamMoments.tables

    def __init__(self, moments: AdamMoments, rate: Rate) -> None:
        self.moments = moments

    def numbers(self, learning_rate, step):
        return {"learning_rate": self.moments.correction(learning_rate, step)}

    def arguments(self, values):
        return self.moments.arguments(values["learning_rate"])


class Adam(Solver):
    """Adaptive moment estimation, in MATLAB's form (adamupdate): see `AdamMoments`.

        w <- w - learning_rate * correction * m / (sqrt(v) + epsilon)

    The other parameters are those of `SGDM`.
    """

    solver = "adam"
    title = "Adam"
    defaults = Solver.defaults | {"squared_gradient_decay_factor": 0.999}

    def __init__(
        self,
        learning_rate: float | None = None,
        gradient_decay_factor: float = 0.9,
        squared_gradient_decay_factor: float | None = None,
        epsilon: float = 1e-8,
        l2: float = 0.0,
        l2_factors: Factors = None,
        learning_rate_factors: Factors = None,
        *,
        gradient_threshold: float = math.inf,
        gradient_threshold_method: str = "l2norm",
    ) -> None:
        square_decay = self.value("squared_gradient_decay_factor", squared_gradient_decay_factor)
        super().__init__(
            self.value("learning_rate", learning_rate),
            WeightDecay(l2, l2_factors),
            Clip(gradient_threshold, gradient_threshold_method),
            AdamMoments(gradient_decay_factor, square_decay, epsilon),
            Rate(),
            learning_rate_factors=learning_rate_factors,
        )


def power(base: float, exponent: int) -> float:
    """Return base ** exponent by multiplications alone: C libraries round pow() differently."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result
