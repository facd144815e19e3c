"""Build optimizers, which compute new parameters from gradients, as chains of transforms.

All ranks hold the same parameters and gradients and compute the same step, so an optimizer does not
communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpidl import backends
from mpidl.text import did_you_mean
from mpidl.training.optimizers.transforms import (
    Arrays,
    Numbers,
    Tables,
    Transform,
    Updates,
    WeightDecay,
    backend_of,
    check,
)

__all__ = ["FusedTail", "Optimizer", "fuses"]

AVERAGE = "average"  # name of the table of averaged parameters


class Optimizer:
    """An optimizer that is a chain of transforms.

    The chain transforms gradients into weight changes, which are added to the parameters. For
    example, `Optimizer(0.1, Clip(1.0), WeightDecay(1e-4), Momentum(0.9), Rate())` is gradient
    descent with momentum in PyTorch's form. The built-in solvers are also chains. Some sequences of
    transforms at the end of a chain run as one kernel, such as (Rate, Momentum) or
    (AdamMoments, Rate); see `fuses`.

    Parameters
    ----------
    learning_rate : float
        The learning rate. Schedules assign to the attribute of the same name.
    *transforms : Transform
        The transforms, in the order in which they change the gradients.
    learning_rate_factors : dict, optional
        {name: factor} by which the learning rate of a parameter is multiplied, 1 by default. A
        parameter with the factor 0 does not change and needs no gradient. `net.factors` contains
        the factors of a network's layers. Pass them as in `SGDM(0.01, **net.factors)`.

    Attributes
    ----------
    average_share : float or None
        If the optimizer keeps an average of the parameters, each step updates the average to
        average + average_share * (parameter - average). None if the optimizer keeps no average; see
        `keep_average`.
    """

    def __init__(
        self,
        learning_rate: float,
        *transforms: Transform,
        learning_rate_factors: Mapping[str, float] | None = None,
    ) -> None:
        self.learning_rate: float = check("learning_rate", learning_rate)
        for transform in transforms:
            if not isinstance(transform, Transform):
                raise TypeError(f"expected transforms such as Clip(1.0), got {transform!r}")
        self.transforms = transforms
        self.learning_rate_factors = dict(learning_rate_factors or {})
        tables = [table for transform in transforms for table in transform.tables]
        if len(set(tables)) < len(tables):
            raise ValueError(f"two transforms have a table of the same name: {', '.join(tables)}")
        self.state_arrays: Tables = {table: {} for table in tables}
        self.steps: int = 0
        self.average_share: float | None = None
        parts, self._fused = _fused_tail(transforms)
        if self._fused is not None:
            parts = (*parts, self._fused)
        # Prefix the names of each part's scalars, because two parts may use the same name.
        self._parts = [(f"optimizer.{i}.", part) for i, part in enumerate(parts)]

    def __call__(
        self, parameters: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the parameters after a training step. The arguments are not changed.

        Parameters
        ----------
        parameters, gradients : dict
            {name: array}. The step is computed in the precision of the parameters, usually float32.

        Raises
        ------
        ValueError
            If the names or shapes of parameters and gradients do not match.
        """
        return self.apply(parameters, gradients, self.advance())

    def keep_average(self, is_kept: bool = True) -> None:
        """Start a new average of the parameters, or discard the average.

        An earlier average is discarded. The new average starts as zeros, and `average_share` starts
        as 0. The caller must set `average_share` to 1 in the first step that the average includes.

        Parameters
        ----------
        is_kept : bool
            Whether to keep an average from now on.
        """
        if is_kept:
            self.state_arrays[AVERAGE] = {}
        else:
            self.state_arrays.pop(AVERAGE, None)
        self.average_share = 0.0 if is_kept else None

    @property
    def averages(self) -> dict[str, np.ndarray]:
        """The averages of all parameters that are not frozen, by name; see `keep_average`."""
        return dict(self.state_arrays.get(AVERAGE, {}))

    def numbers(self) -> dict[str, float]:
        """Return the scalars of the next step that can differ between steps.

        Returns
        -------
        dict
            {name: number}, including for example the learning rate.
        """
        numbers = {
            prefix + name: value
            for prefix, part in self._parts
            for name, value in part.numbers(self.learning_rate, self.steps + 1).items()
        }
        return numbers if self.average_share is None else numbers | {AVERAGE: self.average_share}

    def advance(self) -> dict[str, float]:
        """Return the scalars of the next step, and increment the step count.

        Returns
        -------
        dict
            {name: number}, as for `numbers`.
        """
        numbers = self.numbers()
        self.steps += 1
        return numbers

    def apply(
        self,
        parameters: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray],
        numbers: Mapping[str, float],
    ) -> dict[str, np.ndarray]:
        """Return the parameters after a training step with the given scalars.

        While a training step is being recorded, the update is recorded and does not run.

        Parameters
        ----------
        parameters, gradients : dict
            {name: array}
        numbers : dict
            The scalars of the step, as returned by `advance`.

        Returns
        -------
        dict
            {name: new array}

        Raises
        ------
        ValueError
            If the names or shapes of parameters and gradients do not match.
        """
        self._check_names(parameters)
        moving = self._moving(parameters)
        match("gradients", gradients, moving, parameters)
        for table, arrays in self.state_arrays.items():
            if arrays:
                match(f"{table} arrays", arrays, moving, parameters)
        self.prepare(parameters)
        names, weights = list(moving), list(moving.values())
        state_arrays = {
            table: [arrays[n] for n in names] for table, arrays in self.state_arrays.items()
        }
        backend = backend_of(
            [*weights, *(array for arrays in state_arrays.values() for array in arrays)]
        )
        updates = Updates(
            backend,
            names,
            weights,
            [gradients[name] for name in names],
            [self.learning_rate_factors.get(name, 1.0) for name in names],
        )
        for prefix, part in self._parts:
            values = {
                name.removeprefix(prefix): backend.step_number(name, value)
                for name, value in numbers.items()
                if name.startswith(prefix)
            }
            part_arrays = [state_arrays[table] for table in part.tables]
            if part is self._fused:
                weights = part.step(updates, part_arrays, values)
            else:
                part.apply(updates, part_arrays, values)
        if self._fused is None:
            weights = _added(updates)
        if self.average_share is not None:
            share = [backend.step_number(AVERAGE, numbers[AVERAGE])]
            averages, decays = [state_arrays[AVERAGE]], updates.take_decays()
            weights = backend.optimizer_step(AVERAGE, weights, weights, averages, share, decays)
        return {**parameters, **dict(zip(names, weights, strict=True))}

    def spec(self) -> list[list[Any]]:
        """Return the transforms with their arguments, for JSON.

        A resumed run must have the same spec as its checkpoint.

        Returns
        -------
        list of list
            One list per transform: its class name, then its arguments.
        """
        factors = {"learning_rate_factors": self.learning_rate_factors}
        parts = [[type(part).__name__, _arguments(vars(part))] for part in self.transforms]
        return [[type(self).__name__, _arguments(factors)], *parts]

    def _check_names(self, parameters):
        tables = [("learning_rate_factors", self.learning_rate_factors)]
        for transform in self.transforms:
            if isinstance(transform, WeightDecay):
                tables.append(("l2_factors", transform.factors))
        for table, factors in tables:
            for name in factors:
                if name not in parameters:
                    hint = did_you_mean(name, parameters)
                    raise ValueError(f"{table}: unknown parameter {name}{hint}")

    def _moving(self, parameters):
        """Return the parameters that are not frozen: their learning-rate factor is not 0."""
        factors = self.learning_rate_factors
        return {name: w for name, w in parameters.items() if factors.get(name, 1.0) != 0}

    def prepare(self, parameters: Mapping[str, Any]) -> None:
        """Create missing state arrays as zeros, and move the state to the device of the parameters.

        Parameters
        ----------
        parameters : dict
            {name: array} of the parameters that the next step updates.
        """
        for arrays in self.state_arrays.values():
            for name, w in self._moving(parameters).items():
                if name not in arrays:
                    arrays[name] = backends.of_array(w).zeros_like(w)
                elif isinstance(arrays[name], np.ndarray) and not isinstance(w, np.ndarray):
                    arrays[name] = backends.of_array(w).from_numpy(arrays[name], w)

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of the optimizer's arrays, for a checkpoint.

        Returns
        -------
        dict
            {name: array}, with the step count as "steps" if the optimizer depends on it.
        """
        arrays = {
            f"{table}.{name}": np.array(array)
            for table, arrays in self.state_arrays.items()
            for name, array in arrays.items()
        }
        if any(transform.counts_steps for transform in self.transforms):
            return {"steps": np.array(self.steps, np.int64), **arrays}
        return arrays

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the arrays that the method `state` returned.

        Parameters
        ----------
        state : dict
            {name: array}

        Raises
        ------
        ValueError
            If an array has an unknown name.
        """
        state = dict(state)
        state_arrays: Tables = {table: {} for table in self.state_arrays}
        steps = 0
        if any(transform.counts_steps for transform in self.transforms):
            steps = int(state.pop("steps", 0))
        for name, array in state.items():
            table, _, parameter = name.partition(".")
            if table not in state_arrays or not parameter:
                tables = " and ".join(state_arrays) or "no tables"
                raise ValueError(
                    f"the state of {type(self).__name__} contains unknown array {name}; expected "
                    f"arrays of {tables}"
                )
            state_arrays[table][parameter] = np.array(array, order="C")
        self.state_arrays, self.steps = state_arrays, steps


class FusedTail:
    """The last transforms of a chain, computed together by one kernel of a backend.

    Parameters
    ----------
    *transforms : Transform
        The transforms that the kernel computes together, in the order of the chain.

    Attributes
    ----------
    formula : str
        Name of the formula that `optimizer_step` of the backends computes.
    tables : tuple of str
        Names of the tables of state arrays that the formula updates.
    transforms : tuple of Transform
        The transforms.
    """

    formula: str
    tables: tuple[str, ...]

    def __init__(self, *transforms: Transform) -> None:
        self.transforms: tuple[Transform, ...] = transforms

    def numbers(self, learning_rate: float, step: int) -> dict[str, float]:
        """Return the scalars of a step that can differ between steps; see `Transform.numbers`.

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
        return {"learning_rate": learning_rate}

    def arguments(self, values: Mapping[str, float]) -> list[float]:
        """Return the arguments of the formula, in its order.

        Parameters
        ----------
        values : dict
            The scalars that `numbers` returned, converted by `step_number` of the backend.

        Returns
        -------
        list of float
            The arguments.
        """
        return [values["learning_rate"]]

    def step(self, updates: Updates, state_arrays: Arrays, values: Numbers) -> list:
        """Return the weights after the step, and update the state arrays in place.

        Parameters
        ----------
        updates : Updates
            The weights, the gradients and the learning-rate factors.
        state_arrays : list of list
            For each table in `tables`, a list of one state array per weight.
        values : dict
            The scalars that `numbers` returned, converted by `step_number` of the backend.

        Returns
        -------
        list of array
            The new weights.
        """
        return updates.stepped(
            self.formula, state_arrays, self.arguments(values), updates.rate_factors
        )


FUSED: dict[tuple[type[Transform], ...], type[FusedTail]] = {}  # filled by `fuses`


def fuses(*transforms: type[Transform]) -> Callable[[type[FusedTail]], type[FusedTail]]:
    """Return a class decorator that declares which transforms a `FusedTail` computes.

    Parameters
    ----------
    *transforms : type
        The classes of the transforms at the end of a chain, in order.

    Returns
    -------
    callable
        A decorator for subclasses of `FusedTail`.
    """

    def declare(tail: type[FusedTail]) -> type[FusedTail]:
        FUSED[transforms] = tail
        return tail

    return declare


def _fused_tail(transforms):
    """Split a chain into (first transforms, FusedTail), or return (transforms, None).

    The last transforms are fused only if the transforms before them keep no arrays.
    """
    for types, tail in FUSED.items():
        before, last = transforms[: -len(types)], transforms[-len(types) :]
        if types == tuple(map(type, last)) and not any(part.tables for part in before):
            return before, tail(*last)
    return transforms, None


def _arguments(attributes):
    """Return the attributes for JSON; values that JSON cannot represent are replaced by repr()."""
    return {
        name: value if isinstance(value, str | int | float | bool | dict | None) else repr(value)
        for name, value in attributes.items()
    }


def _added(updates):
    """Return weights + updates, computed as an SGDM step with rate -1 and momentum 0."""
    updates.add_decays()
    return updates.stepped("sgdm", [updates.zeros()], [-1.0, 0.0])


def match(
    label: str,
    arrays: Mapping[str, Any],
    moving: Mapping[str, Any],
    parameters: Mapping[str, Any],
) -> None:
    """Raise ValueError if arrays do not match the parameters.

    Parameters
    ----------
    label : str
        Describes the arrays in the error message.
    arrays : dict
        {name: array}. There must be an array of the same shape for each parameter in `moving`.
    moving : dict
        The parameters that the step changes.
    parameters : dict
        All parameters. An array with a name that is not in `parameters` is an error.
    """
    missing = [name for name in moving if name not in arrays]
    unknown = [name for name in arrays if name not in parameters]
    if missing or unknown:
        problems = [f"missing {n}" for n in missing] + [f"unknown {n}" for n in unknown]
        frozen = " (if its layer is frozen, pass **net.factors to the optimizer)"
        hint = frozen if missing and label == "gradients" else ""
        raise ValueError(f"{label} do not match the parameters: {', '.join(problems)}{hint}")
    for name, weight in moving.items():
        shape = np.shape(arrays[name])
        if shape != weight.shape:
            raise ValueError(f"{label} of {name}: expected shape {weight.shape}, found {shape}")
