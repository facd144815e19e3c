"""Test the promise with the core alone: the bytes of a gradient do not depend on the ranks.

The ranks are simulated by a loop, without a job, a backend or a layer.
"""

import subprocess
import sys

import numpy as np
import pytest
from folding import add_up

from mpidl.core import fold, keyed
from mpidl.core.blocks import LANES, from_images, share
from mpidl.core.grad import value_and_grad
from mpidl.core.op import op

COUNT, INPUTS, OUTPUTS = 16 * 11 + 5, 7, 3


class Rank:
    """One of several simulated ranks, which no op needs to sum over."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def gplus(self, value):
        raise AssertionError("this loss needs no sum before the end")


@op
def dense(x, weight):
    return x @ weight, lambda dy: (dy @ weight.T, x.T @ dy)


@op
def squared_norm(x):
    """Return the sum of squares of each image's entries, (n,)."""
    return (x * x).sum(axis=1), lambda dy: (2 * x * dy[:, None],)


@op(blocks=True)
def total(x):
    """Add up one number per image: a Partial of one term, whose leaves are sums over blocks."""
    counter = fold.Counter(x.batch.tree)
    for block in range(x.batch.blocks):
        counter.push(np.asarray(x.block(block).sum()))

    def vjp(dy, needs):
        return (x.like(np.broadcast_to(dy, x.lanes.shape).astype(x.dtype)),)

    return counter.partial((), x.dtype), vjp


def loss(weights, images):
    return total(squared_norm(dense(dense(images, weights["first"]), weights["second"])))


def wide(label, *shape):
    """Return float32 numbers of many magnitudes, so that another order gives other bytes."""
    sign = 2 * keyed.uniform(1, label, int(np.prod(shape))) - 1
    size = 10.0 ** (4 * keyed.uniform(2, label, int(np.prod(shape))) - 2)
    return (sign * size).reshape(shape).astype(np.float32)


def gradients_on(ranks, combine):
    """Return the gradients of all ranks' images, as `combine` adds up the Partials of the ranks."""
    images = wide("images", COUNT, INPUTS)
    weights = {"first": wide("first", INPUTS, 5), "second": wide("second", 5, OUTPUTS)}
    partials = []
    for rank in range(ranks):
        batch = share(COUNT, Rank(rank, ranks))
        first, stop = batch.images
        value, gradients = value_and_grad(loss)(weights, from_images(images[first:stop], batch))
        partials.append({"loss": value, **gradients})
    return {name: combine([of_rank[name] for of_rank in partials]) for name in partials[0]}


def in_order_of_ranks(partials):
    """Add up the sums of the ranks, as MPI_Allreduce may do."""
    return np.sum([partial.local() for partial in partials], axis=0, dtype=np.float32)


def test_the_bytes_do_not_depend_on_the_number_of_ranks():
    expected = gradients_on(1, add_up)
    for ranks in (2, 3, 4, 7, 12, 13):  # there are 12 blocks, so one of 13 ranks has none
        gradients = gradients_on(ranks, add_up)
        for name, array in expected.items():
            assert array.tobytes() == gradients[name].tobytes(), (name, ranks)


def test_the_gradients_are_those_of_the_definition():
    gradients = gradients_on(3, add_up)
    x, first, second = (
        wide(*arguments).astype(np.float64)
        for arguments in (("images", COUNT, INPUTS), ("first", INPUTS, 5), ("second", 5, OUTPUTS))
    )
    dy = 2 * x @ first @ second
    np.testing.assert_allclose(gradients["first"], x.T @ dy @ second.T, rtol=1e-3, atol=1)
    np.testing.assert_allclose(gradients["second"], (x @ first).T @ dy, rtol=1e-3, atol=1)


def test_sums_of_the_ranks_have_other_bytes():
    """Negative control: the promise comes from the fold."""
    expected, gradients = gradients_on(1, in_order_of_ranks), gradients_on(5, in_order_of_ranks)
    assert any(expected[name].tobytes() != gradients[name].tobytes() for name in expected)


@pytest.mark.parametrize("name", ["grad", "op", "keyed"])
def test_the_core_imports_numpy_alone(name):
    """It also works without the rest of the package."""
    program = """
import importlib, pathlib, sys, types
import numpy, numpy.random
package = types.ModuleType("mpidl")
package.__path__ = [sys.argv[1]]
sys.modules["mpidl"] = package
before = set(sys.modules)
importlib.import_module("mpidl.core." + sys.argv[2])
for module in sorted(set(sys.modules) - before):
    top = module.partition(".")[0]
    if not module.startswith("mpidl.core") and top not in (*sys.stdlib_module_names, "numpy"):
        print(module)
"""
    folder = fold.__file__.removesuffix("core/fold.py")
    words = [sys.executable, "-c", program, folder, name]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_a_block_has_as_many_images_as_lanes():
    batch = share(COUNT, Rank(0, 1))
    assert batch.blocks == -(-COUNT // LANES) and batch.valid(batch.blocks - 1) == COUNT % LANES
