"""SGD with momentum: transforms, fused step and solver."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from mpidl.training.optimizers.chain import FusedTail, fuses
from mpidl.training.optimizers.solvers import Factors, Solver
from mpidl.training.optimizers.transforms import (
    BIASES_AND_NORMS,
    Clip,
    Rate,
    Transform,
    Updates,
    WeightDecay,
    check,
)
from mpidl.training.options.option_types import ON_OFF, check_value, one_of

NESTEROV = one_of(*ON_OFF)  # the valid values of `nesterov`


class Momentum(Transform):
    """Accumulate updates, v <- momentum * v + update, and return v as the new update.

    Parameters
    ----------
    momentum : float
        Fraction of v that is kept per step, from 0 to 1.
    """

    counts_steps = False
    tables = ("velocity",)
    formula = "sgdm"

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum: float = check("momentum", momentum)

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"momentum": self.momentum}

    def apply(
        self, updates: Updates, state_arrays: list[list[np.ndarray]], numbers: Mapping[str, Any]
    ) -> None:
        updates.arrays = updates.stepped_zeros(
            self.formula, state_arrays, [-1.0, numbers["momentum"]]
        )


class NesterovMomentum(Momentum):
    """Accumulate v as `Momentum` does, and return momentum * v + update as the new update.

    This is Nesterov's accelerated gradient in the form of torch.optim.SGD(nesterov=True): the
    stored parameters are the point at which the gradient is computed. See Sutskever et al., "On the
    importance of initialization and momentum in deep learning", 2013.

    Parameters
    ----------
    momentum : float
        Fraction of v that is kept per step, from 0 to 1.
    """

    formula = "nesterov"


@fuses(Rate, Momentum)
@fuses(Rate, NesterovMomentum)
class _RateMomentum(FusedTail):
    """Compute an SGD step, with momentum or Nesterov's momentum, in one kernel.

    The step is v <- momentum * v - rate * g, then w <- w + v or, for Nesterov's momentum,
    w <- w + momentum * v - rate * g.
    """

    tables = Momentum.tables

    def __init__(self, rate: Rate, momentum: Momentum) -> None:
        self.momentum, self.formula = momentum, momentum.formula

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"learning_rate": learning_rate, **self.momentum.numbers(learning_rate, step)}

    def arguments(self, values):
        return [values["learning_rate"], values["momentum"]]


class SGDM(Solver):
    """Stochastic gradient descent with momentum, in the form of MATLAB's sgdmupdate.

        v <- momentum * v - learning_rate * g,    w <- w + v

    Parameters
    ----------
    learning_rate : float, optional
        Learning rate; by default 0.01.
    momentum : float
        Fraction of the previous step that is added to the current one.
    l2 : float
        L2 regularization factor: l2 * factor * w is added to the gradient.
    l2_factors : dict, optional
        {name: factor}; see `WeightDecay`.
    learning_rate_factors : dict, optional
        {name: factor}; see `Optimizer`.
    gradient_threshold, gradient_threshold_method
        See `Clip`. The gradient that is clipped includes the L2 term.
    nesterov : bool
        Whether to use Nesterov's momentum: w <- w + momentum * v - learning_rate * g, with the new
        v. See `NesterovMomentum`.
    decay_exclude : str
        Learnables that do not decay; see `WeightDecay`.

    Notes
    -----
    PyTorch computes v <- momentum * v + g, w <- w - learning_rate * v. At a constant learning rate,
    both forms give the same steps. If the rate changes, the earlier steps in v keep the old rate in
    this solver, whereas PyTorch immediately scales them by the new rate.
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
        nesterov: bool | Literal["on", "off"] = False,
        decay_exclude: str = BIASES_AND_NORMS,
    ) -> None:
        is_nesterov = check_value(NESTEROV, nesterov, "nesterov") == "on"
        super().__init__(
            learning_rate,
            WeightDecay(l2, l2_factors, decay_exclude),
            Clip(gradient_threshold, gradient_threshold_method),
            Rate(),
            (NesterovMomentum if is_nesterov else Momentum)(momentum),
            learning_rate_factors=learning_rate_factors,
        )

    @property
    def velocity(self) -> dict[str, np.ndarray]:
        """The velocities v, {parameter: array}; empty before the first step."""
        return self.state_arrays["velocity"]
