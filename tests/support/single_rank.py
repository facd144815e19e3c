"""One rank that holds the whole mini-batch, without MPI: what any number of ranks must equal."""

import numpy as np

import mpidl as dl
from mpidl import keyed


class SingleRank:
    """A world of one rank. Its share is everything, so each sum has been folded to its root."""

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
    """The same uniform numbers for everyone who asks by this name."""
    drawn = keyed.uniform(0, f"test {name}", int(np.prod(shape)))
    return (low + (high - low) * drawn).reshape(shape).astype(dtype)


def blocked(world, *arrays, batch=None):
    """This rank's share of arrays that every rank has whole, as Blocked values of one batch."""
    batch = dl.share(len(arrays[0]), world) if batch is None else batch
    values = tuple(dl.from_images(a[slice(*batch.images)], batch) for a in arrays)
    return values if len(values) > 1 else values[0]


def all_images(world, value):
    """All images of a Blocked value on every rank, as a plain array in their order."""
    shares = world.broadcast(world.gather(value.local())) if world.size > 1 else [value.local()]
    return np.concatenate(shares)


def finite_differences(loss, parameters, step=1e-6, most=40):
    """d loss / d parameter by central differences, at up to `most` elements of each.

    Returns {name: (flat indices, slopes)}; loss(parameters) is a plain number.
    """
    found = {}
    for name, value in parameters.items():
        chosen = np.unique(np.linspace(0, value.size - 1, most).astype(int))
        slopes = []
        for i in chosen:
            ends = []
            for t in (step, -step):
                moved = value.copy()
                moved.flat[i] += t
                ends.append(float(loss({**parameters, name: moved})))
            slopes.append((ends[0] - ends[1]) / (2 * step))
        found[name] = (chosen, np.array(slopes))
    return found


def assert_slopes(gradients, differences, tolerance=1e-6):
    """Gradients equal finite differences, relative to the largest of each."""
    for name, (chosen, slopes) in differences.items():
        size = max(abs(slopes).max(), 1e-3)
        error = abs(gradients[name].ravel()[chosen] - slopes).max() / size
        assert error < tolerance, f"{name}: relative error {error:.3g}"
