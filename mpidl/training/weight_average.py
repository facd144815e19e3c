"""Average the weights over iterations: exponential moving averages (EMA) and SWA.

SWA (stochastic weight averaging) averages the weights at fixed intervals of iterations. The
optimizer updates the average after each step and keeps it with its state arrays, so checkpoints and
recorded steps include the average. This module computes the share of each iteration's weights in
the average.
"""

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mpidl.errors import UserError
from mpidl.options.declaration import at_least, choice, fraction, option, options_class
from mpidl.training.optimizers import Optimizer

if TYPE_CHECKING:
    from mpidl.nn import Network
    from mpidl.training.options.training_options import TrainingOptions


@options_class(group="Solver", resume="fixed")
class AverageOptions:
    """The options of `TrainingOptions` for the average of the weights."""

    average: Literal["none", "ema", "swa"] = choice(
        "Average of the weights: an exponential moving average over iterations (ema), or the mean "
        "of the weights at the ends of epochs (swa)",
        default="none",
    )
    average_decay: float = option(
        fraction(),
        "Factor by which the moving average decays per update (ema)",
        default=0.999,
    )
    average_start: int | None = option(
        at_least(1, optional=True),
        "Epoch with which the average starts; by default the first epoch (ema), or the epoch after "
        "three quarters of --epochs (swa)",
        default=None,
    )
    average_every: int = option(
        at_least(0),
        "Iterations between updates of the average; 0 updates it after each iteration (ema) or "
        "epoch (swa)",
        default=0,
    )
    average_use: Literal["average", "raw"] = choice(
        "If there is an average: weights to use for validation, for the test and in the trained "
        "network",
        default="average",
    )


class WeightAverage:
    """The average of the weights of a run, according to its options.

    Parameters
    ----------
    options : TrainingOptions
        The options of the run.
    optimizer : Optimizer or CustomOptimizer
        The optimizer. If the options request an average, the optimizer keeps it from now on.

    Raises
    ------
    UserError
        If the options request an average, and the optimizer is a custom object.
    """

    def __init__(self, options: "TrainingOptions", optimizer: Any) -> None:
        self.options, self.optimizer = options, optimizer
        self.is_kept = options.average != "none"
        if isinstance(optimizer, Optimizer):
            optimizer.keep_average(self.is_kept)
        elif self.is_kept:
            raise UserError(
                f"--average {options.average}: expected an optimizer of mpidl, which keeps the "
                f"average, found {type(optimizer).__name__}"
            )

    def prepare_step(self, iteration: int, per_epoch: int) -> None:
        """Before a training step, set the share of its new weights in the average."""
        if self.is_kept:
            self.optimizer.average_share = self.share(iteration, per_epoch)

    def share(self, iteration: int, per_epoch: int) -> float:
        """Return the share of an iteration's weights in the average.

        Parameters
        ----------
        iteration : int
            Iteration of the run, from 1.
        per_epoch : int
            Iterations per epoch.

        Returns
        -------
        float
            0 if the iteration's weights are not averaged, as for most iterations with SWA. 1 for
            the first weights of the average. For later weights, 1 - decay with EMA, or 1 / n for
            the n-th weights with SWA.
        """
        count, is_due = self._count(iteration, per_epoch)
        if not is_due:
            return 0.0
        if self.options.average == "ema" and count > 1:
            return 1 - self.options.average_decay
        return 1 / count

    def _count(self, iteration, per_epoch):
        """Return how many iterations the average includes, and whether it includes this one."""
        options, is_ema = self.options, self.options.average == "ema"
        first_epoch = options.average_start or (1 if is_ema else options.epochs * 3 // 4 + 1)
        interval = options.average_every or (1 if is_ema else per_epoch)
        iterations = max(iteration - (first_epoch - 1) * per_epoch, 0)
        count, rest = divmod(iterations, interval)
        return count, count > 0 and rest == 0

    def replaces_weights(self, iteration: int, per_epoch: int) -> bool:
        """Return whether the network to evaluate or save has the averaged weights.

        Parameters
        ----------
        iteration : int
            Number of completed iterations.
        per_epoch : int
            Iterations per epoch.

        Returns
        -------
        bool
            False before the average starts, and if the options choose the weights of the last
            iteration.
        """
        is_used = self.is_kept and self.options.average_use == "average"
        return is_used and self._count(iteration, per_epoch)[0] > 0

    def network(self, net: "Network") -> "Network":
        """Return a copy of the network with the averaged weights.

        Parameters
        ----------
        net : Network
            The network being trained.

        Returns
        -------
        Network
            The copy, which shares the state and the frozen learnables with `net`.
        """
        averaged = net.bind(self.optimizer.averages)
        averaged.training = net.training
        return averaged

    def arrays(self) -> dict[str, np.ndarray]:
        """Return copies of the averages in host memory, by name."""
        return {name: np.array(array) for name, array in self.optimizer.averages.items()}
