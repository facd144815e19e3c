"""Checks of a vjp against differences."""

import numpy as np

from mpidl import keyed
from mpidl.autodiff.tape import Var, backward, batch_of, value_of
from mpidl.blocks import Blocked, from_images
from mpidl.fold import Partial


def check_vjp(f, *args, step=1e-6, tolerance=1e-6, seed=0):
    """Check the vjp of `f(*args)` along one random direction: <v, J d> = <vjp(v), d>.

    J d is the central difference of f at args +- step * d. Floating arguments (NumPy arrays and
    Blocked values, float64 for the default step and tolerance) are varied together. Returns the
    relative difference; AssertionError where it is above `tolerance`. Collective where an argument
    is blocked.
    """
    batch = batch_of(*args)
    world = batch.world if batch else None

    def direction(i, value):
        label = f"check_vjp {i}"
        if isinstance(value, Blocked):
            count = int(np.prod(value.shape))
            whole = 2 * keyed.uniform(seed, label, count).reshape(value.shape) - 1
            return from_images(whole[slice(*value.batch.images)], value.batch, value.dtype)
        count = int(np.prod(np.shape(value)))
        return (2 * keyed.uniform(seed, label, count) - 1).reshape(np.shape(value))

    def added(value):
        return world.gplus(value) if isinstance(value, Partial) else value

    def inner(a, b):
        if isinstance(a, Blocked):
            mine = np.array([np.sum(a.local() * b.local(), dtype=np.float64)])
            return float(world.gplus(mine)[0])
        return float(np.sum(np.asarray(a) * np.asarray(b), dtype=np.float64))

    def moved(value, d, t):
        return (
            value.like(value.lanes + t * d.lanes) if isinstance(value, Blocked) else value + t * d
        )

    floating = [i for i, a in enumerate(args) if np.dtype(getattr(a, "dtype", "O")).kind == "f"]
    steps = {i: direction(i, args[i]) for i in floating}

    def at(t):
        shifted = [moved(a, steps[i], t) if i in steps else a for i, a in enumerate(args)]
        return added(value_of(f(*shifted)))

    y = f(*[Var(a, name=f"argument {i}") if i in steps else a for i, a in enumerate(args)])
    v = direction("v", added(y.value))
    high, low = at(step), at(-step)
    slope = high.like(high.lanes - low.lanes) if isinstance(high, Blocked) else high - low
    forward = inner(slope, v) / (2 * step)
    reverse = 0.0
    for i, d in steps.items():
        leaf = [Var(a, name="x") if j == i else a for j, a in enumerate(args)]
        found = backward(f(*leaf), v, fold=world.gplus if world else None)[leaf[i]]
        reverse += inner(added(found), d)
    difference = abs(forward - reverse) / max(abs(forward), abs(reverse), 1e-300)
    if not difference <= tolerance:
        raise AssertionError(
            f"vjp of {getattr(f, '__name__', f)}: <v, J d> = {forward:.12g} by differences, "
            f"<vjp(v), d> = {reverse:.12g}, relative difference {difference:.3g} > {tolerance:g}"
        )
    return difference
