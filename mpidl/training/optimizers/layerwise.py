"""Define the transforms of LARS and LAMB, which scale the step of each layer by its norms."""

from __future__ import annotations

from collections.abc import Mapping

from mpidl.training.optimizers.adam import CorrectedAdamMoments
from mpidl.training.optimizers.chain import FusedTail, fuses
from mpidl.training.optimizers.transforms import (
    BIASES_AND_NORMS,
    Arrays,
    Numbers,
    Rate,
    Transform,
    Updates,
    WeightDecay,
    check,
    decay_factor,
)

__all__ = ["LambTrustRatio", "LarsTrustRatio"]


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
        Updates of a parameter with the factor 0 are not scaled.
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

    def apply(self, updates: Updates, state_arrays: Arrays, numbers: Numbers) -> None:
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
    The ratio is 1 if the weights or the update are zero. The parameters are those of
    `LarsTrustRatio`.
    """

    method = "lamb"

    def __init__(
        self, factors: Mapping[str, float] | None = None, exclude: str = BIASES_AND_NORMS
    ) -> None:
        super().__init__(1.0, factors, exclude)


@fuses(CorrectedAdamMoments, WeightDecay, LambTrustRatio, Rate)
class _LambRate(FusedTail):
    """A step of LAMB, which updates the weights directly instead of updating zeros first."""

    tables = CorrectedAdamMoments.tables

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        moments = self.transforms[0].numbers(learning_rate, step)
        return {"learning_rate": learning_rate, **moments}

    def step(self, updates: Updates, state_arrays: Arrays, values: Numbers) -> list:
        moments, decay, ratio, _ = self.transforms
        moments.apply(updates, state_arrays, values)
        decay.apply(updates, [], {})
        ratio.apply(updates, [], {})
        return updates.stepped(
            "sgdm", [updates.zeros()], [values["learning_rate"], 0.0], updates.rate_factors
        )
