"""Transforms of gradients: the parts that optimizers are chains of.

A transform changes the updates of one step in place: `WeightDecay` and `Clip` change gradients,
`Momentum`, `AdamMoments` and `RMSPropMoment` turn them into directions, `Rate` into steps. Each
also works alone: `Clip(1.0)(parameters, gradients)` returns the clipped gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpidl import backends
from mpidl.backends.interface import Backend
from mpidl.training.options import training_options

Tables = dict[str, dict[str, np.ndarray]]  # {table: {parameter: array}}


class Updates:
    """What one step adds to the parameters, on its way through the transforms.

    Attributes
    ----------
    backend : Backend
        Computes the step: that of the parameters' arrays.
    names, weights, arrays : list
        The names of the parameters that move, their values, their gradients or steps.
    decays : list of float
        decay * weight is still to be added to each array; the next kernel adds it on its way.
    rate_factors : list of float
        Of each parameter's learning rate.
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
        """Return the pending decays, for a kernel that adds them."""
        decays, self.decays = self.decays, [0.0] * len(self.names)
        return decays

    def add_decays(self) -> None:
        """Add the pending decays to the arrays."""
        if any(self.decays):
            decays = self.take_decays()
            self.arrays = self.backend.clip(
                self.weights, self.arrays, decays, "absolute-value", math.inf
            )

    def zeros(self) -> list[np.ndarray]:
        return [self.backend.zeros_like(weight) for weight in self.weights]


class Transform:
    """Base class of transforms.

    A transform that keeps arrays from step to step names their tables. One whose numbers change
    from step to step returns them from `numbers`, so that a recorded step can replay with others.
    """

    tables: tuple[str, ...] = ()
    counts_steps = True  # whether `numbers` depends on the number of the step: checkpoints keep it

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        """Return the numbers of a step, counted from 1."""
        return {}

    def apply(
        self, updates: Updates, state_arrays: list[list[np.ndarray]], numbers: Mapping[str, Any]
    ) -> None:
        """Change the updates in place. `state_arrays` has a list of arrays for each table."""
        raise TypeError(f"{type(self).__name__} does not say how it changes updates")

    def __call__(
        self, parameters: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the changed gradients; a transform with tables starts from zeros."""
        names = list(gradients)
        weights = [parameters[name] for name in names]
        arrays = [gradients[name] for name in names]
        updates = Updates(backend_of(weights), names, weights, arrays, [1.0] * len(names))
        state_arrays = [updates.zeros() for _ in self.tables]
        self.apply(updates, state_arrays, self.numbers(1.0, 1))
        updates.add_decays()
        return dict(zip(names, updates.arrays, strict=True))


def backend_of(arrays: list[np.ndarray]) -> Backend:
    """Return the backend of float32 arrays, or the reference for others."""
    if arrays and all(array.dtype == np.float32 for array in arrays):
        return backends.of_array(arrays[0])
    return backends.of_type(np.float64)


class WeightDecay(Transform):
    """Add l2 * factor * weight to each gradient: the gradient of an L2 penalty.

    Parameters
    ----------
    l2 : float
    factors : dict, optional
        {name: factor}; by default 1 for names that end in ".weight", 0 for others (biases, gamma,
        beta).
    """

    counts_steps = False

    def __init__(self, l2: float, factors: Mapping[str, float] | None = None) -> None:
        self.l2: float = training_options.check("l2", l2)
        self.factors = dict(factors or {})

    def factor(self, name: str) -> float:
        return self.factors.get(name, 1.0 if name.endswith(".weight") else 0.0)

    def apply(
        self, updates: Updates, state_arrays: list[list[np.ndarray]], numbers: Mapping[str, Any]
    ) -> None:
        updates.add_decays()
        updates.decays = [self.l2 * self.factor(name) for name in updates.names]


class Clip(Transform):
    """Make gradients no larger than a threshold, as MATLAB's GradientThreshold.

    Parameters
    ----------
    threshold : float
    method : str
        "l2norm" scales each parameter's gradient to that norm, "global-l2norm" all of them to that
        norm of all together, "absolute-value" limits each number. Norms are summed in float64, in
        one order.
    """

    counts_steps = False

    def __init__(self, threshold: float = math.inf, method: str = "l2norm") -> None:
        self.threshold: float = training_options.check("gradient_threshold", threshold)
        self.method: str = training_options.check("gradient_threshold_method", method)

    def apply(
        self, updates: Updates, state_arrays: list[list[np.ndarray]], numbers: Mapping[str, Any]
    ) -> None:
        if self.threshold < math.inf:
            decays = updates.take_decays()
            updates.arrays = updates.backend.clip(
                updates.weights, updates.arrays, decays, self.method, self.threshold
            )


class Rate(Transform):
    """Turn directions into steps: -learning_rate * factor * direction."""

    counts_steps = False

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"learning_rate": learning_rate}

    def apply(
        self, updates: Updates, state_arrays: list[list[np.ndarray]], numbers: Mapping[str, Any]
    ) -> None:
        updates.add_decays()
        updates.arrays = updates.backend.sgdm(
            updates.zeros(),
            updates.arrays,
            updates.zeros(),
            numbers["learning_rate"],
            0.0,
            updates.take_decays(),
            updates.rate_factors,
        )


class Momentum(Transform):
    """Accumulate: v <- momentum * v + update; the update becomes v."""

    counts_steps = False
    tables = ("velocity",)

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum: float = training_options.check("momentum", momentum)

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"momentum": self.momentum}

    def apply(
        self, updates: Updates, state_arrays: list[list[np.ndarray]], numbers: Mapping[str, Any]
    ) -> None:
        updates.add_decays()
        ones = [1.0] * len(updates.names)
        updates.arrays = updates.backend.sgdm(
            updates.zeros(),
            updates.arrays,
            state_arrays[0],
            -1.0,
            numbers["momentum"],
            updates.take_decays(),
            ones,
        )


class AdamMoments(Transform):
    """Divide the moving mean of the gradient by the root of that of its square.

        m <- gradient_decay * m + (1 - gradient_decay) * g
        v <- square_decay * v + (1 - square_decay) * g^2
        direction = correction * m / (sqrt(v) + epsilon)

    with correction = sqrt(1 - square_decay^t) / (1 - gradient_decay^t) in step t. Kingma and Ba,
    "Adam: a method for stochastic optimization", 2015, algorithm 1 with the order of computation of
    the end of its section 2, as in MATLAB. PyTorch adds epsilon after the correction of v: the same
    if epsilon is small beside sqrt(v).
    """

    tables = ("mean", "square")

    def __init__(
        self, gradient_decay: float = 0.9, square_decay: float = 0.999, epsilon: float = 1e-8
    ) -> None:
        self.gradient_decay: float = training_options.check("gradient_decay_factor", gradient_decay)
        self.square_decay: float = training_options.check(
            "squared_gradient_decay_factor", square_decay
        )
        self.epsilon: float = training_options.check("epsilon", epsilon)

    def correction(self, rate: float, step: int) -> float:
        """Return rate * correction of a step."""
        mean = 1 - power(self.gradient_decay, step)
        square = 1 - power(self.square_decay, step)
        return rate * math.sqrt(square) / mean

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        return {"correction": self.correction(-1.0, step)}

    def apply(
        self, updates: Updates, state_arrays: list[list[np.ndarray]], numbers: Mapping[str, Any]
    ) -> None:
        updates.add_decays()
        updates.arrays = updates.backend.adam(
            updates.zeros(),
            updates.arrays,
            state_arrays[0],
            state_arrays[1],
            numbers["correction"],
            self.gradient_decay,
            self.square_decay,
            self.epsilon,
            updates.take_decays(),
            [1.0] * len(updates.names),
        )


class RMSPropMoment(Transform):
    """Divide the gradient by the root of the moving mean of its square.

        v <- square_decay * v + (1 - square_decay) * g^2
        direction = g / (sqrt(v) + epsilon)

    Tieleman and Hinton, "Neural networks for machine learning", lecture 6.5, 2012.
    """

    counts_steps = False
    tables = ("square",)

    def __init__(self, square_decay: float = 0.9, epsilon: float = 1e-8) -> None:
        self.square_decay: float = training_options.check(
            "squared_gradient_decay_factor", square_decay
        )
        self.epsilon: float = training_options.check("epsilon", epsilon)

    def apply(
        self, updates: Updates, state_arrays: list[list[np.ndarray]], numbers: Mapping[str, Any]
    ) -> None:
        updates.add_decays()
        updates.arrays = updates.backend.rmsprop(
            updates.zeros(),
            updates.arrays,
            state_arrays[0],
            -1.0,
            self.square_decay,
            self.epsilon,
            updates.take_decays(),
            [1.0] * len(updates.names),
        )


def power(base: float, exponent: int) -> float:
    """Return base ** exponent by multiplications alone: C libraries round pow() differently."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result
