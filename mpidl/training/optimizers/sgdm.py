"""Define the transforms and the fused step of SGD with momentum."""

from __future__ import annotations

from typing import Literal

from mpidl.training.optimizers.chain import FusedTail, fuses
from mpidl.training.optimizers.transforms import Arrays, Numbers, Rate, Transform, Updates, check

__all__ = ["Momentum", "NesterovMomentum"]


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

    def apply(self, updates: Updates, state_arrays: Arrays, numbers: Numbers) -> None:
        updates.arrays = updates.stepped_zeros(
            self.formula, state_arrays, [-1.0, numbers["momentum"]]
        )


class NesterovMomentum(Momentum):
    """Replace each update by momentum * v + update, with the velocity v of `Momentum`.

    This is Nesterov's accelerated gradient in the form of torch.optim.SGD(nesterov=True): gradients
    are computed at the stored parameters. See Sutskever et al., "On the importance of
    initialization and momentum in deep learning", 2013.
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
        super().__init__(rate, momentum)
        self.formula = momentum.formula

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"learning_rate": learning_rate, **self.transforms[1].numbers(learning_rate, step)}

    def arguments(self, values):
        return [values["learning_rate"], values["momentum"]]
