"""Define LARS and LAMB, which scale the steps of each layer by the norm of its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from mpidl.matlab_names import explain_arguments
from mpidl.training.optimizers.adam import AdamW, CorrectedAdamMoments
from mpidl.training.optimizers.chain import FusedTail, fuses
from mpidl.training.optimizers.sgdm import momentum_of
from mpidl.training.optimizers.solvers import Factors, Solver
from mpidl.training.optimizers.transforms import (
    BIASES_AND_NORMS,
    Clip,
    Rate,
    Transform,
    Updates,
    WeightDecay,
    check,
    decay_factor,
)


class LarsTrustRatio(Transform):
    """Multiply each update by coefficient * |w| / (|update| + decay * |w|).

    The scaled update includes the weight decay of a preceding transform: after `WeightDecay(l2)`,
    the result is ratio * (update + l2 * w). This is equation 6 of You, Gitman and Ginsburg, "Large
    batch training of convolutional networks", 2017.

    Parameters
    ----------
    coefficient : float
        The trust coefficient.
    factors : dict, optional
        Multiplier of the weight decay of each parameter, {name: factor}; see `WeightDecay`.
        Updates of a parameter with the factor 0 are not scaled. For names without an entry, the
        factor is 1 if the name ends in ".weight", and 0 otherwise.
    exclude : str
        Parameters without weight decay; see `WeightDecay`. Their updates are not scaled.

    Notes
    -----
    If only the update is zero, the ratio is coefficient / decay, as in the paper, so the weights
    still decay. The paper's ratio of zero weights is 0, so such weights would never change; here,
    the ratio is then 1. Norms are computed in float64 in a fixed order, so that all ranks compute
    the same bytes.
    """

    counts_steps = False
    method = "lars"

    def __init__(
        self,
        coefficient: float = 0.001,
        factors: Mapping[str, float] | None = None,
        exclude: str = BIASES_AND_NORMS,
    ) -> None:
        self.coefficient: float = check("trust_coefficient", coefficient)
        self.factors = dict(factors or {})
        self.exclude: str = check("decay_exclude", exclude)

    def apply(
        self, updates: Updates, state_arrays: list[list[np.ndarray]], numbers: Mapping[str, Any]
    ) -> None:
        factors = [decay_factor(name, self.factors, self.exclude) for name in updates.names]
        coefficients = [self.coefficient if factor else 0.0 for factor in factors]
        decays = updates.take_decays()
        updates.arrays = updates.backend.trust(
            updates.weights, updates.arrays, decays, coefficients, self.method
        )


class LambTrustRatio(LarsTrustRatio):
    """Multiply each update by |w| / |update|, where the update includes the weight decay.

    This is the layerwise adaptation in algorithm 2 of You et al., "Large batch optimization for
    deep learning: training BERT in 76 minutes", 2020, with the identity as the scaling function.
    The ratio is 1 if the weights or the update are zero.

    Parameters
    ----------
    factors : dict, optional
        Multiplier of the weight decay of each parameter, {name: factor}; see `LarsTrustRatio`.
    exclude : str
        Parameters without weight decay; see `LarsTrustRatio`.
    """

    method = "lamb"

    def __init__(
        self,
        factors: Mapping[str, float] | None = None,
        exclude: str = BIASES_AND_NORMS,
    ) -> None:
        super().__init__(1.0, factors, exclude)


@fuses(CorrectedAdamMoments, WeightDecay, LambTrustRatio, Rate)
class _LambRate(FusedTail):
    """A step of LAMB, which updates the weights directly instead of updating zeros first."""

    tables = CorrectedAdamMoments.tables

    def __init__(
        self,
        moments: CorrectedAdamMoments,
        decay: WeightDecay,
        ratio: LambTrustRatio,
        rate: Rate,
    ) -> None:
        self.moments, self.parts = moments, (decay, ratio)

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"learning_rate": learning_rate, **self.moments.numbers(learning_rate, step)}

    def step(self, updates: Updates, state_arrays: list[list], values: Mapping[str, Any]) -> list:
        self.moments.apply(updates, state_arrays, values)
        for part in self.parts:
            part.apply(updates, [], {})
        return updates.backend.optimizer_step(
            "sgdm",
            updates.weights,
            updates.arrays,
            [updates.zeros()],
            [values["learning_rate"], 0.0],
            updates.take_decays(),
            updates.rate_factors,
        )


class LARS(Solver):
    """Layerwise adaptive rate scaling: SGD with momentum, scaled by the norms of the weights.

        v <- momentum * v - learning_rate * ratio * (g + l2 * w),    w <- w + v

    where ratio = trust_coefficient * |w| / (|g| + l2 * |w|) for each learnable with weight decay,
    and 1 for other learnables; see `LarsTrustRatio`. The method is intended for mini-batches of
    thousands of images.

    Parameters
    ----------
    learning_rate : float, optional
        Learning rate. The default is 1, because the ratio is a few thousandths.
    momentum : float
        Fraction of the previous step that is added to the current step.
    trust_coefficient : float
        Factor in the ratio.
    l2 : float
        The weight decay, which is added after the gradient is clipped.
    l2_factors : dict, optional
        Multiplier of the weight decay of each learnable, {name: factor}; see `WeightDecay`.
        Updates of a learnable with the factor 0 are not scaled.
    learning_rate_factors : dict, optional
        Multiplier of the learning rate of each learnable, {name: factor}; see `Optimizer`.
    gradient_threshold, gradient_threshold_method
        Arguments of `Clip`.
    nesterov : bool
        Whether to use Nesterov's momentum; see `NesterovMomentum`.
    decay_exclude : str
        Learnables without weight decay; see `WeightDecay`. Their updates are not scaled.

    Notes
    -----
    The method is algorithm 1 of You, Gitman and Ginsburg, "Large batch training of convolutional
    networks", 2017. In the paper, the learning rate decreases as a polynomial of power 2, which the
    options `learn_rate_schedule="polynomial"` and `learn_rate_power=2` select.
    """

    solver = "lars"
    title = "LARS"
    defaults = Solver.defaults | {"learning_rate": 1.0}

    @explain_arguments
    def __init__(
        self,
        learning_rate: float | None = None,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        l2: float = 1e-4,
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
            Clip(gradient_threshold, gradient_threshold_method),
            WeightDecay(l2, l2_factors, decay_exclude),
            LarsTrustRatio(trust_coefficient, l2_factors, decay_exclude),
            Rate(),
            momentum_of(momentum, nesterov),
            learning_rate_factors=learning_rate_factors,
        )


class LAMB(AdamW):
    """Layerwise adaptive moments: AdamW with steps scaled by the norms of the weights.

        u = m_hat / (sqrt(v_hat) + epsilon) + l2 * w
        w <- w - learning_rate * |w| / |u| * u

    The ratio |w| / |u| is replaced by 1 for learnables without weight decay; see `LambTrustRatio`.
    `CorrectedAdamMoments` defines m_hat and v_hat. The method is intended for mini-batches of
    thousands of images.

    Parameters
    ----------
    l2 : float, optional
        The decoupled weight decay. The default is 0.01.
    l2_factors : dict, optional
        Multiplier of the weight decay of each learnable, {name: factor}; see `WeightDecay`.
        Updates of a learnable with the factor 0 are not scaled.
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
        Arguments of `Clip`. The weight decay is added after the gradient is clipped.
    decay_exclude : str
        Learnables without weight decay; see `WeightDecay`. Their updates are not scaled.

    Notes
    -----
    The method is algorithm 2 of You et al., "Large batch optimization for deep learning: training
    BERT in 76 minutes", 2020.
    """

    solver = "lamb"
    title = "LAMB"

    def _scalings(self, l2_factors, decay_exclude):
        return (LambTrustRatio(l2_factors, decay_exclude),)
