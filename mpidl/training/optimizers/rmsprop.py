"""Define the transform, the fused step and the solver of RMSProp."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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


class RMSPropMoment(Transform):
    """Divide the gradient g by sqrt(v) + epsilon, where v is the moving mean of g^2.

        v <- square_decay * v + (1 - square_decay) * g^2
        direction = g / (sqrt(v) + epsilon)

    See Tieleman and Hinton, "Neural networks for machine learning", lecture 6.5, 2012.

    Parameters
    ----------
    square_decay : float
        Factor, at least 0 and below 1, by which v decays in each step.
    epsilon : float
        A small number added to sqrt(v).
    """

    counts_steps = False
    tables = ("square",)

    def __init__(self, square_decay: float = 0.9, epsilon: float = 1e-8) -> None:
        self.square_decay: float = check("squared_gradient_decay_factor", square_decay)
        self.epsilon: float = check("epsilon", epsilon)

    def arguments(self, rate: float) -> list[float]:
        """Return the arguments for the backends' formula "rmsprop".

        Parameters
        ----------
        rate : float
            Learning rate.

        Returns
        -------
        list of float
            The arguments in the order of the formula.
        """
        return [rate, self.square_decay, 1 - self.square_decay, self.epsilon]

    def apply(
        self, updates: Updates, state_arrays: list[list[np.ndarray]], numbers: Mapping[str, Any]
    ) -> None:
        updates.arrays = updates.stepped_zeros("rmsprop", state_arrays, self.arguments(-1.0))


@fuses(RMSPropMoment, Rate)
class _RMSPropRate(FusedTail):
    """A step of RMSProp, computed by one kernel."""

    formula = "rmsprop"
    tables = RMSPropMoment.tables

    def __init__(self, moment: RMSPropMoment, rate: Rate) -> None:
        self.moment = moment

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"learning_rate": learning_rate}

    def arguments(self, values):
        return self.moment.arguments(values["learning_rate"])


class RMSProp(Solver):
    """RMSProp in the form of MATLAB's rmspropupdate; see `RMSPropMoment`.

        w <- w - learning_rate * g / (sqrt(v) + epsilon)

    Here g is the gradient, and v is the moving mean of g^2.

    Parameters
    ----------
    learning_rate : float, optional
        Learning rate. The default is 0.001.
    squared_gradient_decay_factor : float, optional
        Factor, at least 0 and below 1, by which v decays in each step. The default is 0.9.
    epsilon : float
        A small number added to sqrt(v).
    l2 : float
        L2 regularization factor: l2 * factor * w is added to the gradient.
    l2_factors : dict, optional
        Multiplier of the weight decay of each learnable, {name: factor}; see `WeightDecay`.
    learning_rate_factors : dict, optional
        Multiplier of the learning rate of each learnable, {name: factor}; see `Optimizer`.
    gradient_threshold, gradient_threshold_method
        Arguments of `Clip`. The L2 term is added before the gradient is clipped.
    decay_exclude : str
        Learnables without weight decay; see `WeightDecay`.
    """

    solver = "rmsprop"
    title = "RMSProp"
    defaults = Solver.defaults | {"squared_gradient_decay_factor": 0.9}

    @explain_arguments
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
        decay_exclude: str = BIASES_AND_NORMS,
    ) -> None:
        square_decay = self.value("squared_gradient_decay_factor", squared_gradient_decay_factor)
        super().__init__(
            learning_rate,
            WeightDecay(l2, l2_factors, decay_exclude),
            Clip(gradient_threshold, gradient_threshold_method),
            RMSPropMoment(square_decay, epsilon),
            Rate(),
            learning_rate_factors=learning_rate_factors,
        )
