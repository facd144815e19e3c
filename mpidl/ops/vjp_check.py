"""Check the vector-Jacobian product (vjp) of a function against central differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpidl.core import keyed
from mpidl.core.blocks import Blocked, from_images
from mpidl.core.fold import Partial
from mpidl.core.tape import Var, backward, batch_of, value_of


def check_vjp(
    f: Callable[..., Any],
    *args: Any,
    step: float = 1e-6,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> float:
    """Check the vjp of `f(*args)` along one random direction d: <v, J d> = <vjp(v), d>.

    J is the Jacobian of f, and v a random cotangent. If an argument is Blocked, this function is
    collective.

    Parameters
    ----------
    f
        The function to check.
    args
        Arguments of f. All floating-point arrays and Blocked values among them are varied together.
        The default step and tolerance require float64.
    step
        Step t of the central difference (f(args + t d) - f(args - t d)) / (2 t), which is
        approximately J d.
    tolerance
        Largest relative difference between <v, J d> and <vjp(v), d>.
    seed
        Seed of the random d and v.

    Returns
    -------
    float
        The relative difference.

    Raises
    ------
    AssertionError
        If the relative difference is above the tolerance.
    """
    batch = batch_of(*args)
    world = batch.world if batch else None

    def direction(i: object, value: Any) -> Any:
        label = f"check_vjp {i}"
        if isinstance(value, Blocked):
            count = int(np.prod(value.shape))
            entries = 2 * keyed.uniform(seed, label, count).reshape(value.shape) - 1
            return from_images(entries[slice(*value.batch.images)], value.batch, value.dtype)
        count = int(np.prod(np.shape(value)))
        return (2 * keyed.uniform(seed, label, count) - 1).reshape(np.shape(value))

    def fold(value: Any) -> Any:
        return world.gplus(value) if world and isinstance(value, Partial) else value

    def inner(a: Any, b: Any) -> float:
        if isinstance(a, Blocked):
            world = a.batch.world
            local = np.array([np.sum(a.local() * b.local(), dtype=np.float64)])
            return float(world.gplus(local)[0])
        return float(np.sum(np.asarray(a) * np.asarray(b), dtype=np.float64))

    def shift(value: Any, d: Any, t: float) -> Any:
        return (
            value.like(value.lanes + t * d.lanes) if isinstance(value, Blocked) else value + t * d
        )

    floating = [i for i, a in enumerate(args) if np.dtype(getattr(a, "dtype", "O")).kind == "f"]
    directions = {i: direction(i, args[i]) for i in floating}

    def shifted_value(t: float) -> Any:
        shifted = [shift(a, directions[i], t) if i in directions else a for i, a in enumerate(args)]
        return fold(value_of(f(*shifted)))

    y = f(*[Var(a, name=f"argument {i}") if i in directions else a for i, a in enumerate(args)])
    v = direction("v", fold(y.value))
    high, low = shifted_value(step), shifted_value(-step)
    slope = high.like(high.lanes - low.lanes) if isinstance(high, Blocked) else high - low
    forward = inner(slope, v) / (2 * step)
    reverse = 0.0
    for i, d in directions.items():
        traced = [Var(a, name="x") if j == i else a for j, a in enumerate(args)]
        gradient = backward(f(*traced), v, fold=world.gplus if world else None)[traced[i]]
        reverse += inner(fold(gradient), d)
    difference = abs(forward - reverse) / max(abs(forward), abs(reverse), 1e-300)
    if not difference <= tolerance:
        raise AssertionError(
            f"vjp of {getattr(f, '__name__', f)}: <v, J d> = {forward:.12g} by differences, "
            f"<vjp(v), d> = {reverse:.12g}, relative difference {difference:.3g} > {tolerance:g}"
        )
    return difference
