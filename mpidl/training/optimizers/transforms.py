"""Define transforms of gradients, from which optimizers are built.

A transform changes the updates of one training step in place. `WeightDecay` and `Clip` change
gradients, and `Rate` turns directions into weight changes. Other transforms turn gradients into
directions and are defined in the modules of the solvers: `Momentum` (sgdm), `AdamMoments` (adam)
and `RMSPropMoment` (rmsprop). Each transform can also be called separately:
`Clip(1.0)(parameters, gradients)` returns the clipped gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpidl import backends
from mpidl.training.optimizers.options import check

if TYPE_CHECKING:
    from mpidl.backends.interface import Backend

__all__ = ["Clip", "Rate", "Transform", "WeightDecay"]

Tables = dict[str, dict[str, np.ndarray]]  # {table: {parameter: array}}
Arrays: TypeAlias = list[list[np.ndarray]]  # for each table of a transform, an array per parameter
Numbers: TypeAlias = Mapping[str, Any]  # the scalars of a training step, {name: number}

BIASES_AND_NORMS = "biases-and-norms"


class Updates:
    """The updates of one training step, which transforms turn from gradients into weight changes.

    Attributes
    ----------
    backend : Backend
        The backend of the parameters, which computes the updates.
    names, weights : list
        The names and values of the parameters that the training step changes.
    arrays : list
        The updates: gradients before the first transform, weight changes after the last transform.
    decays : list of float
        For each array, a pending weight decay d. The next kernel adds d * weight to the array.
    rate_factors : list of float
        For each parameter, a factor that multiplies the learning rate.
    """

    def __init__(
        self,
        backend: Backend,
        names: list[str],
        weights: list[np.ndarray],
        arrays: list[np.ndarray],
        rate_factors: list[float],
    ) -> None:
        self.backend, self.names, self.weights = backend, names, weights
        self.arrays, self.rate_factors = arrays, rate_factors
        self.decays = [0.0] * len(names)

    def take_decays(self) -> list[float]:
        """Return the pending decays, which the calling kernel will add, and reset them to 0."""
        decays, self.decays = self.decays, [0.0] * len(self.names)
        return decays

    def add_decays(self) -> None:
        """Add the pending decays to the arrays."""
        if any(self.decays):
            decays = self.take_decays()
            self.arrays = self.backend.clip(
                self.weights, self.arrays, decays, "absolute-value", math.inf
            )

    def stepped(
        self,
        formula: str,
        state_arrays: list[list],
        numbers: Sequence[Any],
        factors: list[float] | None = None,
        weights: list | None = None,
    ) -> list:
        """Return the weights after a step of a formula that `optimizer_step` of backends computes.

        The formula updates the state arrays in place. `factors` of the learning rate are 1 by
        default.
        """
        return self.backend.optimizer_step(
            formula,
            self.weights if weights is None else weights,
            self.arrays,
            state_arrays,
            numbers,
            self.take_decays(),
            factors,
        )

    def stepped_zeros(
        self, formula: str, state_arrays: list[list], numbers: Sequence[Any], factors=None
    ) -> list:
        """Return the weight changes of a formula, computed by applying it to zero weights."""
        self.add_decays()
        return self.stepped(formula, state_arrays, numbers, factors, self.zeros())

    def zeros(self) -> list:
        return [self.backend.zeros_like(weight) for weight in self.weights]


class Transform:
    """Base class of transforms.

    A transform that keeps arrays between training steps lists the tables of these arrays in
    `tables`. If a transform uses scalars that change from step to step, its method `numbers`
    returns the scalars, so that a recorded training step can be replayed with new values.
    """

    tables: tuple[str, ...] = ()
    counts_steps = True  # whether `numbers` depends on the step count, which checkpoints then store

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        """Return the scalars of training step `step`, counted from 1.

        Parameters
        ----------
        learning_rate : float
            Learning rate of the step.
        step : int
            Training step, from 1.

        Returns
        -------
        dict
            {name: number}
        """
        return {}

    def apply(self, updates: Updates, state_arrays: Arrays, numbers: Numbers) -> None:
        """Change the updates in place.

        Parameters
        ----------
        updates : Updates
            The updates of the training step.
        state_arrays : list of list
            For each table in `tables`, a list of one array per parameter. The method changes the
            arrays in place.
        numbers : dict
            The result of the method `numbers` for this training step.
        """
        raise TypeError(f"{type(self).__name__} does not define apply")

    def __call__(
        self, parameters: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the transformed gradients, with state arrays of zeros as in the first step."""
        names = list(gradients)
        weights = [parameters[name] for name in names]
        arrays = [gradients[name] for name in names]
        updates = Updates(backend_of(weights), names, weights, arrays, [1.0] * len(names))
        state_arrays = [updates.zeros() for _ in self.tables]
        self.apply(updates, state_arrays, self.numbers(1.0, 1))
        updates.add_decays()
        return dict(zip(names, updates.arrays, strict=True))


def backend_of(arrays: list[np.ndarray]) -> Backend:
    """Return the backend of float32 arrays, or the reference backend for other types."""
    if arrays and all(array.dtype == np.float32 for array in arrays):
        return backends.of_array(arrays[0])
    return backends.of_type(np.float64)


def decay_factor(name: str, factors: Mapping[str, float], exclude: str) -> float:
    """Return the weight-decay factor of a parameter; see `WeightDecay`."""
    kind = name.rpartition(".")[2]
    factor = factors.get(name, 1.0 if kind == "weight" else 0.0)
    if factor or kind == "weight" or exclude == BIASES_AND_NORMS:
        return factor
    return 0.0 if kind == "bias" and exclude == "biases" else 1.0


class WeightDecay(Transform):
    """Add l2 * factor * weight, the gradient of an L2 penalty, to each gradient.

    Parameters
    ----------
    l2 : float
        The regularization factor for all parameters.
    factors : dict, optional
        {name: factor} by which `l2` is multiplied for a parameter. The default is 1 for names that
        end in ".weight". For other names (biases, gamma, beta), `exclude` determines the default.
    exclude : {"biases-and-norms", "biases", "none"}
        Which parameters other than weights have the factor 0: biases and the parameters of
        normalization layers ("biases-and-norms"), only biases ("biases"), or none ("none"). All
        other parameters have the factor 1. A factor in `factors` other than 0 takes precedence.
    """

    counts_steps = False
    exclude: str = BIASES_AND_NORMS

    def __init__(
        self,
        l2: float,
        factors: Mapping[str, float] | None = None,
        exclude: str = BIASES_AND_NORMS,
    ) -> None:
        self.l2: float = check("l2", l2)
        self.factors = dict(factors or {})
        # Older checkpoints have no attribute `exclude`, so set it only if it is not the default.
        if check("decay_exclude", exclude) != BIASES_AND_NORMS:
            self.exclude = exclude

    def factor(self, name: str) -> float:
        """Return the weight-decay factor of a parameter.

        Parameters
        ----------
        name : str
            Name of the parameter, such as "conv1.weight".

        Returns
        -------
        float
            The factor; 0 for a parameter without weight decay.
        """
        return decay_factor(name, self.factors, self.exclude)

    def apply(self, updates: Updates, state_arrays: Arrays, numbers: Numbers) -> None:
        updates.add_decays()
        updates.decays = [self.l2 * self.factor(name) for name in updates.names]


class Clip(Transform):
    """Limit gradients to a threshold, like MATLAB's GradientThreshold.

    Parameters
    ----------
    threshold : float
        The largest allowed norm or absolute value. inf disables clipping.
    method : str
        "l2norm" limits the norm of each parameter's gradient, "global-l2norm" limits the norm of
        all gradients together, and "absolute-value" limits each element. Norms are summed in
        float64 in a fixed order.
    """

    counts_steps = False

    def __init__(self, threshold: float = math.inf, method: str = "l2norm") -> None:
        self.threshold: float = check("gradient_threshold", threshold)
        self.method: str = check("gradient_threshold_method", method)

    def apply(self, updates: Updates, state_arrays: Arrays, numbers: Numbers) -> None:
        if self.threshold < math.inf:
            decays = updates.take_decays()
            updates.arrays = updates.backend.clip(
                updates.weights, updates.arrays, decays, self.method, self.threshold
            )


class Rate(Transform):
    """Turn each direction into the weight change -learning_rate * factor * direction."""

    counts_steps = False

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"learning_rate": learning_rate}

    def apply(self, updates: Updates, state_arrays: Arrays, numbers: Numbers) -> None:
        updates.arrays = updates.stepped_zeros(
            "sgdm", [updates.zeros()], [numbers["learning_rate"], 0.0], updates.rate_factors
        )
