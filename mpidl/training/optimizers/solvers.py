"""The solvers of the options, in MATLAB's forms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpidl.training.optimizers.chain import Optimizer
from mpidl.training.optimizers.transforms import (
    AdamMoments,
    Clip,
    Momentum,
    Rate,
    RMSPropMoment,
    WeightDecay,
)
from mpidl.training.options import training_options
from mpidl.training.options.training_options import TrainingOptions

Factors = Mapping[str, float] | None


class SGDM(Optimizer):
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
            _default("learning_rate", self.solver, learning_rate),
            WeightDecay(l2, l2_factors),
            Clip(gradient_threshold, gradient_threshold_method),
            Rate(),
            Momentum(momentum),
            learning_rate_factors=learning_rate_factors,
        )

    @property
    def velocity(self) -> dict[str, np.ndarray]:
        """{parameter: array}; empty before the first step."""
        return self.state_arrays["velocity"]


class Adam(Optimizer):
    """Adaptive moment estimation, in MATLAB's form (adamupdate): see `AdamMoments`.

        w <- w - learning_rate * correction * m / (sqrt(v) + epsilon)

    The other parameters are those of `SGDM`.
    """

    solver = "adam"

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
        square_decay = _default(
            "squared_gradient_decay_factor", self.solver, squared_gradient_decay_factor
        )
        super().__init__(
            _default("learning_rate", self.solver, learning_rate),
            WeightDecay(l2, l2_factors),
            Clip(gradient_threshold, gradient_threshold_method),
            AdamMoments(gradient_decay_factor, square_decay, epsilon),
            Rate(),
            learning_rate_factors=learning_rate_factors,
        )


class RMSProp(Optimizer):
    """Steps divided by the root of the gradient's mean square (rmspropupdate): see `RMSPropMoment`.

        w <- w - learning_rate * g / (sqrt(v) + epsilon)

    The other parameters are those of `SGDM`.
    """

    solver = "rmsprop"

    def __init__(
        self,
        learning_rate: float | None = None,
        squared_gradient_decay_factor: float | None = None,
        epsilon: float = 1e-8,
        l2: float = 0.0,
        l2_factors: Factors = None,
        learning_rate_factors: Factors = None,
        *,
        gradient_threshold: float = math.inf,
        gradient_threshold_method: str = "l2norm",
    ) -> None:
        square_decay = _default(
            "squared_gradient_decay_factor", self.solver, squared_gradient_decay_factor
        )
        super().__init__(
            _default("learning_rate", self.solver, learning_rate),
            WeightDecay(l2, l2_factors),
            Clip(gradient_threshold, gradient_threshold_method),
            RMSPropMoment(square_decay, epsilon),
            Rate(),
            learning_rate_factors=learning_rate_factors,
        )


def _default(name: str, solver: str, value: float | None) -> float:
    value = training_options.check(name, value)
    return training_options.BY_SOLVER[name][solver] if value is None else value


def of_options(options: TrainingOptions, **factors: Factors) -> Optimizer:
    """Return the optimizer that the options name, with the factors of a network."""
    arguments: dict[str, Any] = {
        "learning_rate": options.learning_rate,
        "l2": options.l2,
        "gradient_threshold": options.gradient_threshold,
        "gradient_threshold_method": options.gradient_threshold_method,
        **factors,
    }
    if options.solver == "sgdm":
        return SGDM(momentum=options.momentum, **arguments)
    arguments["squared_gradient_decay_factor"] = options.squared_gradient_decay_factor
    arguments["epsilon"] = options.epsilon
    if options.solver == "rmsprop":
        return RMSProp(**arguments)
    return Adam(gradient_decay_factor=options.gradient_decay_factor, **arguments)
