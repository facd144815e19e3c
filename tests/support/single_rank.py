"""Simulate a world of one rank, whose results any number of ranks must reproduce."""

import numpy as np

import mpidl as dl
from mpidl.core import keyed


class SingleRank:
    """A world of one rank without MPI. Its share is the mini-batch, and it folds sums to roots."""

    rank, size = 0, 1

    def gplus(self, value):
        if isinstance(value, dict):
            return {name: self.gplus(item) for name, item in value.items()}
        if isinstance(value, tuple):
            return tuple(self.gplus(item) for item in value)
        if isinstance(value, dl.Partial):
            return value.finish([np.array(root) for term in value.terms for root in term.nodes])
        return value


def numbers(name, *shape, low=-1.0, high=1.0, dtype=np.float64):
    """Return uniform numbers that depend only on the name and shape, not on the rank."""
    uniform = keyed.uniform(0, f"test {name}", int(np.prod(shape)))
    return (low + (high - low) * uniform).reshape(shape).astype(dtype)


def blocked(world, *arrays, batch=None):
    """Return this rank's share of complete arrays as Blocked values of one batch."""
    batch = dl.share(len(arrays[0]), world) if batch is None else batch
    values = tuple(dl.from_images(a[slice(*batch.images)], batch) for a in arrays)
    return values if len(values) > 1 else values[0]


def all_images(world, value):
    """Return all images of a Blocked value in order, as a plain array on every rank."""
    shares = world.broadcast(world.gather(value.local())) if world.size > 1 else [value.local()]
    return np.concatenate(shares)


def finite_differences(loss, parameters, step=1e-6, max_elements=40):
    """Return d loss / d parameter, by central differences, as {name: (flat indices, slopes)}.

    At most `max_elements` elements of each parameter are changed. loss(parameters) is a float.
    """
    differences = {}
    for name, value in parameters.items():
        indices = np.unique(np.linspace(0, value.size - 1, max_elements).astype(int))
        slopes = []
        for i in indices:
            losses = []
            for change in (step, -step):
                moved = value.copy()
                moved.flat[i] += change
                losses.append(float(loss({**parameters, name: moved})))
            slopes.append((losses[0] - losses[1]) / (2 * step))
        differences[name] = (indices, np.array(slopes))
    return differences


def assert_slopes(gradients, differences, tolerance=1e-6):
    """Compare gradients with finite differences, relative to each parameter's largest slope."""
    for name, (indices, slopes) in differences.items():
        scale = max(abs(slopes).max(), 1e-3)
        error = abs(gradients[name].ravel()[indices] - slopes).max() / scale
        assert error < tolerance, f"{name}: relative error {error:.3g}"
