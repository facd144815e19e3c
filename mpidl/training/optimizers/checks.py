"""Check the optimizer that a user passes to `dl.train`, and describe it for checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from mpidl.errors import UserError
from mpidl.nn import Network
from mpidl.training.optimizers.chain import Optimizer


class CustomOptimizer(Protocol):
    """The interface that `dl.train` requires of a custom optimizer."""

    learning_rate: float

    def __call__(
        self, parameters: dict[str, np.ndarray], gradients: dict[str, np.ndarray], /
    ) -> Mapping[str, np.ndarray]:
        """Return the updated parameters, with the same names, shapes and types."""

    def state(self) -> Mapping[str, np.ndarray]:
        """Return the arrays that checkpoints store."""

    def load_state(self, state: dict[str, np.ndarray], /) -> object:
        """Restore the arrays that `state` returned."""


def check_optimizer(optimizer: Any, net: Network) -> None:
    """Raise UserError if the object cannot be used as the optimizer of the network."""
    missing = [
        name
        for name in ("learning_rate", "__call__", "state", "load_state")
        if not hasattr(optimizer, name)
    ]
    if missing:
        raise UserError(
            f"optimizer: expected an object with learning_rate, __call__, state and load_state, "
            f"found {type(optimizer).__name__} without {', '.join(missing)}"
        )
    if optimizer.learning_rate is None:
        raise UserError("optimizer: expected a learning rate above 0, found None")
    has_factors = any(factor != 1 for factor in net.factors["learning_rate_factors"].values())
    if isinstance(optimizer, Optimizer) and has_factors and not optimizer.learning_rate_factors:
        raise UserError(
            "optimizer: the network has frozen layers or layers with factors: pass the factors to "
            f"the optimizer, {type(optimizer).__name__}(..., **net.factors)"
        )


def checked_step(optimizer: Any, parameters: dict[str, Any], gradients: dict) -> dict[str, Any]:
    """Apply an optimizer, and return the new parameters in the order of the old parameters.

    Raise UserError if a custom optimizer changes the name, shape or type of a parameter.
    """
    stepped = optimizer(parameters, gradients)
    if isinstance(optimizer, Optimizer):
        return stepped
    name = f"optimizer: {type(optimizer).__name__}"
    if not isinstance(stepped, Mapping):
        raise UserError(f"{name} must return new parameters, found {type(stepped).__name__}")
    unknown = [key for key in stepped if key not in parameters]
    missing = [key for key in parameters if key not in stepped]
    if unknown or missing:
        raise UserError(f"{name} must return all parameters; missing {missing}, unknown {unknown}")
    for key, old in parameters.items():
        new = stepped[key]
        if (type(new), getattr(new, "dtype", None)) != (type(old), old.dtype):
            new_type = f"{type(new).__name__} {getattr(new, 'dtype', '')}".strip()
            raise UserError(f"{name}: {key}: expected {old.dtype} as before, found {new_type}")
        if new.shape != old.shape:
            raise UserError(f"{name}: {key}: expected shape {old.shape}, found {new.shape}")
    return {key: stepped[key] for key in parameters}


def optimizer_spec(optimizer: Any) -> list[Any]:
    """Return [class name, spec] of an optimizer; the spec is [] if there is no method `spec`.

    When a run is resumed, this list must equal the list in the checkpoint.
    """
    spec = optimizer.spec() if hasattr(optimizer, "spec") else []
    return [type(optimizer).__qualname__, spec]


def describe_spec(spec: list[Any] | None) -> str:
    """Format the result of `optimizer_spec` for an error message."""
    if spec is None:
        return "the options' solver"
    return f"{spec[0]} {json.dumps(spec[1])}" if spec[1] else spec[0]
