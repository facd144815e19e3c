"""Define the transform and the fused step of RMSProp."""

from __future__ import annotations

from mpidl.training.optimizers.chain import FusedTail, fuses
from mpidl.training.optimizers.transforms import Arrays, Numbers, Rate, Transform, Updates, check

__all__ = ["RMSPropMoment"]


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

    def _arguments(self, rate):
        """Return the arguments of the formula "rmsprop"."""
        return [rate, self.square_decay, 1 - self.square_decay, self.epsilon]

    def apply(self, updates: Updates, state_arrays: Arrays, numbers: Numbers) -> None:
        updates.arrays = updates.stepped_zeros("rmsprop", state_arrays, self._arguments(-1.0))


@fuses(RMSPropMoment, Rate)
class _RMSPropRate(FusedTail):
    """A step of RMSProp, computed by one kernel."""

    transforms: tuple[RMSPropMoment, Rate]
    formula = "rmsprop"
    tables = RMSPropMoment.tables

    def arguments(self, values):
        return self.transforms[0]._arguments(values["learning_rate"])
