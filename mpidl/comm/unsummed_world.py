"""A world without communication, for a run of a training step that computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.core.blocks import Ranks
from mpidl.core.fold import Partial


class UnsummedWorld:
    """A world whose sums have arbitrary values, for the argument `reduce` of `value_and_grad`.

    The world allocates the same arrays, and keeps arrays as long, as a `RecordedWorld`.

    Parameters
    ----------
    world : Ranks
        The ranks.
    """

    def __init__(self, world: Ranks) -> None:
        self.rank, self.size = world.rank, world.size

    def gplus(self, value: Any) -> Any:
        """Return an array with the shape of the sum of a Partial, or a dict of such arrays."""
        if isinstance(value, Mapping):
            return {key: self.gplus(element) for key, element in value.items()}
        if not isinstance(value, Partial):
            return value
        if self.size == 1 and value.is_root:  # this node already is the sum
            return np.reshape(value.terms[0].nodes[0], value.shape)
        return arenas.empty(value.shape, value.dtype)

    def reducer(self) -> UnsummedGradients:
        """Return an object that keeps gradients without summing them."""
        return UnsummedGradients()


class UnsummedGradients:
    """Keeps gradients until the end of the step, without summing them over the ranks."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def push(self, name: str, value: Any) -> None:
        """Keep a named gradient."""
        self._values[name] = value

    def progress(self) -> None:
        """Do nothing, because no exchange is pending."""

    def finish(self) -> dict[str, Any]:
        """Return {name: gradient}."""
        return self._values
