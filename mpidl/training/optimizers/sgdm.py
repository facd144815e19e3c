"""SGD with momentum: its transform, the kernel that fuses it, and its solver."""

from __future__ import annotations

import math
from typing import Any

from mpidl.training.optimizers.chain import FusedTail, fuses
from mpidl.training.optimizers.solvers import Factors, Solver
from mpidl.training.optimizers.transforms import Clip, Rate, Transform, WeightDecay, check


class Momentum(Transform):
    """Accumulate: v <- momentum * v + update; the update becomes v."""

    counts_steps = False
    tables = ("velocity",)

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = check("momentum", momentum)

    def numbers(self, learning_rate, step):
        return {"momentum": self.momentum}

    def apply(self, updates, state_arrays, numbers):
        updates.arrays = updates.stepped_zeros("sgdm", state_arrays, [-1.0, numbers["momentum"]])


@fuses(Rate, Momentum)
class _RateMomentum(FusedTail):
    """v <- momentum * v - rate * g, w <- w + v by one kernel."""

    formula = "sgdm"
    tables = Momentum.tables

    def __init__(self, rate: Rate, momentum: Momentum) -> None:
        self.momentum = momentum

    def numbers(self, learning_rate, step):
        return {"learning_rate": learning_rate, **self.momentum.numbers(learning_rate, step)}

    def arguments(self, values):
        return [values["learning_rate"], values["momentum"]]


class SGDM(Solver):
    """Stochastic gradient descent with momentum, in MATLAB's form (sgdmupdate).

        v <- momentum * v - learning_rate * g,    w <- w + v

    Parameters
    ----------
    learning_rate, momentum : float
    l2 : float
        l2 * factor * w is added to the gradient.
    l2_factors : dict, optional
        {name: factor}, see `WeightDecay`.
    learning_rate_factors : dict, optional
        {name: factor}, see `Optimizer`.
    gradient_threshold, gradient_threshold_method
        See `Clip`; the L2 term counts.

    Notes
    -----
    PyTorch has v <- momentum * v + g, w <- w - learning_rate * v. At a constant rate both make the
    same steps. After a change of the rate, the steps that the momentum keeps are here still those
    of the old rate; PyTorch scales them to the new one at once.
    """

    solver = "sgdm"
    title = "SGD with momentum"
    defaults = Solver.defaults | {"learning_rate": 0.01}

    def __init__(
        self,
        learning_rate: float | None = None,
        momentum: float = 0.9,
        l2: float = 0.0,
        l2_factors: Factors = None,
        learning_rate_factors: Factors = None,
        *,
        gradient_threshold: float = math.inf,
        gradient_threshold_method: str = "l2norm",
    ) -> None:
        super().__init__(
            self.value("learning_rate", learning_rate),
            WeightDecay(l2, l2_factors),
            Clip(gradient_threshold, gradient_threshold_method),
            Rate(),
            Momentum(momentum),
            learning_rate_factors=learning_rate_factors,
        )

    @property
    def velocity(self) -> dict[str, Any]:
        """{parameter: array}; empty before the first step."""
        return self.state_arrays["velocity"]
