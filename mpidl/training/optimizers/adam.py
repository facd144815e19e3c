"""Define the transforms, the fused steps and the solvers of Adam and AdamW."""

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

    def correction(self, rate: float, step: int) -> float:
        """Return rate * correction for a training step.

        Parameters
        ----------
        rate : float
            Learning rate.
        step : int
            Training step, from 1.

        Returns
        -------
        float
            The factor of m / (sqrt(v) + epsilon).
        """
        mean = 1 - power(self.gradient_decay, step)
        square = 1 - power(self.square_decay, step)
        return rate * math.sqrt(square) / mean

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"correction": self.correction(-1.0, step)}

    def arguments(self, rate: float) -> list[float]:
        """Return the arguments for the backends' formula "adam".

        Parameters
        ----------
        rate : float
            Learning rate, multiplied by the correction.

        Returns
        -------
        list of float
            The arguments in the order of the formula.
        """
        mean, square = self.gradient_decay, self.square_decay
        return [rate, mean, 1 - mean, square, 1 - square, self.epsilon]

    def apply(
        self, updates: Updates, state_arrays: list[list[np.ndarray]], numbers: Mapping[str, Any]
    ) -> None:
        arguments = self.arguments(numbers["correction"])
        updates.arrays = updates.stepped_zeros("adam", state_arrays, arguments)


class CorrectedAdamMoments(AdamMoments):
    """Compute Adam's direction with epsilon added to the corrected square root, like PyTorch.

        direction = m_hat / (sqrt(v_hat) + epsilon)

    where m_hat = m / (1 - gradient_decay^t) and v_hat = v / (1 - square_decay^t) in training step
    t. This formula is algorithm 1 of Kingma and Ba. `AdamMoments` computes the same direction if
    its epsilon is replaced by epsilon * sqrt(1 - square_decay^t).

    Parameters
    ----------
    gradient_decay, square_decay : float
        Factors, at least 0 and below 1, by which m and v decay in each step.
    epsilon : float
        A small number added to the square root in the denominator.
    """

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"correction": self.correction(-1.0, step), "epsilon": self.step_epsilon(step)}

    def step_epsilon(self, step: int) -> float:
        """Return the epsilon that a training step adds to the uncorrected root sqrt(v).

        Parameters
        ----------
        step : int
            Training step, from 1.

        Returns
        -------
        float
            epsilon * sqrt(1 - square_decay^step)
        """
        return self.epsilon * math.sqrt(1 - power(self.square_decay, step))

    def apply(
        self, updates: Updates, state_arrays: list[list[np.ndarray]], numbers: Mapping[str, Any]
    ) -> None:
        arguments = [*self.arguments(numbers["correction"])[:-1], numbers["epsilon"]]
        updates.arrays = updates.stepped_zeros("adam", state_arrays, arguments)


@fuses(AdamMoments, Rate)
class _AdamRate(FusedTail):
    """A step of Adam, computed by one kernel."""

    formula = "adam"
    tables = AdamMoments.tables

    def __init__(self, moments: AdamMoments, rate: Rate) -> None:
        self.moments = moments

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"learning_rate": self.moments.correction(learning_rate, step)}

    def arguments(self, values):
        return self.moments.arguments(values["learning_rate"])


@fuses(CorrectedAdamMoments, WeightDecay, Rate)
class _AdamWRate(FusedTail):
    """A step of AdamW, computed by one kernel."""

    formula = "adamw"
    tables = CorrectedAdamMoments.tables

    def __init__(self, moments: CorrectedAdamMoments, decay: WeightDecay, rate: Rate) -> None:
        self.moments, self.decay = moments, decay

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        correction = self.moments.correction(1.0, step)
        epsilon = self.moments.step_epsilon(step)
        return {"learning_rate": learning_rate, "correction": correction, "epsilon": epsilon}

    def arguments(self, values):
        numbers = self.moments.arguments(values["learning_rate"])[:-1]
        return [*numbers, values["epsilon"], values["correction"]]

    def step(self, updates, state_arrays, values):
        # Add the pending decays to the gradients, then set the decay that the kernel adds.
        self.decay.apply(updates, [], {})
        return super().step(updates, state_arrays, values)


class Adam(Solver):
    """Adaptive moment estimation in the form of MATLAB's adamupdate; see `AdamMoments`.

        w <- w - learning_rate * correction * m / (sqrt(v) + epsilon)

    Parameters
    ----------
    learning_rate : float, optional
        Learning rate. The default is 0.001.
    gradient_decay_factor, squared_gradient_decay_factor : float
        Factors, at least 0 and below 1, by which m and v decay in each step. The defaults are 0.9
        and 0.999.
    epsilon : float
        A small number added to the square root in the denominator.
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

    solver = "adam"
    title = "Adam"
    defaults = Solver.defaults | {"squared_gradient_decay_factor": 0.999}

    @explain_arguments
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
        decay_exclude: str = BIASES_AND_NORMS,
    ) -> None:
        square_decay = self.value("squared_gradient_decay_factor", squared_gradient_decay_factor)
        super().__init__(
            learning_rate,
            WeightDecay(l2, l2_factors, decay_exclude),
            Clip(gradient_threshold, gradient_threshold_method),
            AdamMoments(gradient_decay_factor, square_decay, epsilon),
            Rate(),
            learning_rate_factors=learning_rate_factors,
        )


class AdamW(Solver):
    """Adam with decoupled weight decay; see `CorrectedAdamMoments`.

        w <- w - learning_rate * (m_hat / (sqrt(v_hat) + epsilon) + l2 * factor * w)

    Parameters
    ----------
    l2 : float, optional
        The weight decay, called `weight_decay` in PyTorch. The default is 0.01. The moments do not
        include the decay, and the decay is not clipped.
    l2_factors : dict, optional
        Multiplier of the weight decay of each learnable, {name: factor}; see `WeightDecay`.
    learning_rate : float, optional
        Learning rate. The default is 0.001.
    gradient_decay_factor, squared_gradient_decay_factor : float
        Factors, at least 0 and below 1, by which the moments decay in each step. The defaults are
        0.9 and 0.999.
    epsilon : float
        A small number added to the square root in the denominator.
    learning_rate_factors : dict, optional
        Multiplier of the learning rate of each learnable, {name: factor}; see `Optimizer`.
    gradient_threshold, gradient_threshold_method
        Arguments of `Clip`. The clipped gradient does not include the decay.
    decay_exclude : str
        Learnables without weight decay; see `WeightDecay`.

    Notes
    -----
    The method is described in Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
    As in torch.optim.AdamW, the current learning rate also multiplies the decay. In algorithm 2 of
    the paper, only the schedule multiplies the decay, so the paper's lambda is l2 times the initial
    learning rate.
    """

    solver = "adamw"
    title = "AdamW"
    defaults = Adam.defaults | {"l2": 0.01}
    decouples_decay = True

    @explain_arguments
    def __init__(
        self,
        learning_rate: float | None = None,
        gradient_decay_factor: float = 0.9,
        squared_gradient_decay_factor: float | None = None,
        epsilon: float = 1e-8,
        l2: float | None = None,
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
            Clip(gradient_threshold, gradient_threshold_method),
            CorrectedAdamMoments(gradient_decay_factor, square_decay, epsilon),
            WeightDecay(self.value("l2", l2), l2_factors, decay_exclude),
            *self._scalings(l2_factors, decay_exclude),
            Rate(),
            learning_rate_factors=learning_rate_factors,
        )

    def _scalings(self, l2_factors, decay_exclude):
        """Return transforms that scale the update with its decay."""
        return ()


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
