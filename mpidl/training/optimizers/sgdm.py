"""Define the transforms, the fused step and the solver of SGD with momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from mpidl.matlab_names import explain_arguments
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


class Momentum(Transform):
    """Replace each update by the velocity v, where v <- momentum * v + update.

    Parameters
    ----------
    momentum : float
        Fraction of v that is kept in each step; at least 0 and below 1.
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
    """Replace each update by momentum * v + update, with the velocity v of `Momentum`.

    This is Nesterov's accelerated gradient in the form of torch.optim.SGD(nesterov=True): gradients
    are computed at the stored parameters. See Sutskever et al., "On the importance of
    initialization and momentum in deep learning", 2013.

    Parameters
    ----------
    momentum : float
        Fraction of v that is kept in each step; at least 0 and below 1.
    """

    formula = "nesterov"


def momentum_of(momentum: float, nesterov: bool | Literal["on", "off"]) -> Momentum:
    """Return a `NesterovMomentum` if `nesterov` is true or "on", else a `Momentum`."""
    is_nesterov = check("nesterov", nesterov) == "on"
    return NesterovMomentum(momentum) if is_nesterov else Momentum(momentum)


@fuses(Rate, Momentum)
@fuses(Rate, NesterovMomentum)
class _RateMomentum(FusedTail):
    """A step of SGD with momentum or with Nesterov's momentum, computed by one kernel.

    The step computes v <- momentum * v - rate * g and w <- w + v. With Nesterov's momentum, the
    second formula is w <- w + momentum * v - rate * g.
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
        Learning rate. The default is 0.01.
    momentum : float
        Fraction of the previous step that is added to the current step.
    l2 : float
        L2 regularization factor: l2 * factor * w is added to the gradient.
    l2_factors : dict, optional
        Multiplier of the weight decay of each learnable, {name: factor}; see `WeightDecay`.
    learning_rate_factors : dict, optional
        Multiplier of the learning rate of each learnable, {name: factor}; see `Optimizer`.
    gradient_threshold, gradient_threshold_method
        Arguments of `Clip`. The L2 term is added before the gradient is clipped.
    nesterov : bool
        Whether to use Nesterov's momentum: w <- w + momentum * v - learning_rate * g, with the
        updated v. See `NesterovMomentum`.
    decay_exclude : str
        Learnables without weight decay; see `WeightDecay`.

    Notes
    -----
    PyTorch computes v <- momentum * v + g, w <- w - learning_rate * v. With a constant learning
    rate, both forms give the same steps. If the rate changes, PyTorch applies the new rate to all
    gradients accumulated in v. In this solver, each gradient in v keeps the rate of its own step.
    """

    solver = "sgdm"
    title = "SGD with momentum"
    defaults = Solver.defaults | {"learning_rate": 0.01}

    @explain_arguments
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
        super().__init__(
            learning_rate,
            WeightDecay(l2, l2_factors, decay_exclude),
            Clip(gradient_threshold, gradient_threshold_method),
            Rate(),
            momentum_of(momentum, nesterov),
            learning_rate_factors=learning_rate_factors,
        )

    @property
    def velocity(self) -> dict[str, np.ndarray]:
        """The velocities v, {parameter: array}; empty before the first step."""
        return self.state_arrays["velocity"]
