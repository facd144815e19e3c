"""Averages of the weights over iterations: exponential moving averages (EMA) and SWA.

The optimizer updates the average after each step, as one of its state arrays, so checkpoints and
recorded steps contain it. This module computes the share of each iteration's weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidl.errors import UserError
from mpidl.nn import Network
from mpidl.training.optimizers import Optimizer
from mpidl.training.options.training_options import TrainingOptions


class WeightAverage:
    """The average of the weights of a run, according to its options.

    Parameters
    ----------
    options : TrainingOptions
        The options of the run.
    optimizer : Optimizer or CustomOptimizer
        The optimizer, which keeps the average from now on if the options require one.

    Raises
    ------
    UserError
        If a custom optimizer would have to keep an average.
    """

    def __init__(self, options: TrainingOptions, optimizer: Any) -> None:
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
        """Set the share of the weights of an iteration, counted from 1, before its step."""
        if self.is_kept:
            self.optimizer.average_share = self.share(iteration, per_epoch)

    def share(self, iteration: int, per_epoch: int) -> float:
        """Return the share of the weights of an iteration in the average; 0 for most with SWA.

        Parameters
        ----------
        iteration : int
            Iteration of the run, from 1.
        per_epoch : int
            Iterations per epoch.

        Returns
        -------
        float
            1 for the first weights of the average. Then 1 - decay, or 1 / n for the n-th weights.
        """
        count, is_due = self._count(iteration, per_epoch)
        if not is_due:
            return 0.0
        if self.options.average == "ema" and count > 1:
            return 1 - self.options.average_decay
        return 1 / count

    def _count(self, iteration, per_epoch):
        """Return how many weights are averaged after an iteration, and whether its own are."""
        options, is_ema = self.options, self.options.average == "ema"
        first_epoch = options.average_start or (1 if is_ema else options.epochs * 3 // 4 + 1)
        interval = options.average_every or (1 if is_ema else per_epoch)
        iterations = max(iteration - (first_epoch - 1) * per_epoch, 0)
        count, rest = divmod(iterations, interval)
        return count, count > 0 and rest == 0

    def replaces_weights(self, iteration: int, per_epoch: int) -> bool:
        """Return whether the network of an iteration has the average as weights.

        Parameters
        ----------
        iteration : int
            Number of completed iterations.
        per_epoch : int
            Iterations per epoch.

        Returns
        -------
        bool
            False before the average starts, or if the options choose the raw weights.
        """
        is_used = self.is_kept and self.options.average_use == "average"
        return is_used and self._count(iteration, per_epoch)[0] > 0

    def network(self, net: Network) -> Network:
        """Return a copy of the network with the average as weights.

        Parameters
        ----------
        net : Network
            The network that is trained.

        Returns
        -------
        Network
            The copy, which shares the state and the learnables that are frozen.
        """
        averaged = net.bind(self.optimizer.averages)
        averaged.training = net.training
        return averaged

    def arrays(self) -> dict[str, np.ndarray]:
        """Return copies of the averages in host memory, by name."""
        return {name: np.array(array) for name, array in self.optimizer.averages.items()}
