"""Adam, RMSProp and clipping: against float64 loops, PyTorch, and the kernels against NumPy."""

import math

import numpy as np
import pytest
from compiled import everywhere, needed

from mpidl.backends import cpu, reference

SHAPES = {"conv1.weight": (3, 1, 2, 2), "conv1.bias": (3,), "batchnorm1.gamma": (3,)}
ODD = [(), (1,), (17,), (3, 5), (128, 128), (16385,), (0, 4), (50_001,)]  # around a tile's size
DECAYS = [0.0, 0.1, 0.0, 0.01, 1e-4, 1e-10, 0.0, 0.5]
FACTORS = [1.0, 2.0, 0.5, 1.0, 1.0, 20.0, 1.0, 0.1]
METHODS = ["l2norm", "global-l2norm", "absolute-value"]


def tables(seed, dtype=np.float32):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(s).astype(dtype) for name, s in SHAPES.items()}


def odd(seed, low=None):
    random = np.random.default_rng(seed)
    made = [random.standard_normal(s).astype(np.float32) for s in ODD]
    return made if low is None else [np.asarray(np.abs(a) + np.float32(low)) for a in made]


def awkward(arrays):
    """The same numbers: not aligned, not C-ordered, of another type."""
    found = list(arrays)
    found[3] = np.asfortranarray(found[3])
    found[4] = np.ascontiguousarray(found[4].T).T
    found[5] = found[5].astype(np.float64)
    found[7] = np.concatenate([[np.float32(0)], found[7]])[1:]
    return found


@needed
@pytest.mark.parametrize("solver", ["adam", "rmsprop"])
def test_the_kernel_makes_the_bytes_of_numpy(solver):
    def step(backend):
        weights, gradients = odd(0), awkward(odd(1))
        means, squares = odd(2), odd(3, 0.0)
        shared = 0.999, 1e-8, DECAYS, FACTORS
        if solver == "adam":
            new = backend.adam(weights, gradients, means, squares, 0.0123, 0.9, *shared)
        else:
            new = backend.rmsprop(weights, gradients, squares, 0.0123, *shared)
        return new, means, squares

    expected = step(reference)
    for found in everywhere(lambda: step(cpu)).values():
        for one, other in zip(found, expected, strict=True):
            assert [np.asarray(a).tobytes() for a in one] == [
                np.asarray(a).tobytes() for a in other
            ]
            assert all(a.dtype == np.float32 for a in one)


@needed
@pytest.mark.parametrize("threshold", [0.5, 300.0, 1e9])
@pytest.mark.parametrize("method", METHODS)
def test_clipping_in_c_makes_the_bytes_of_numpy(method, threshold):
    """300 is between the norms of the arrays."""
    weights, gradients = odd(0), awkward(odd(1))
    expected = [
        np.asarray(a) for a in reference.clip(weights, gradients, DECAYS, method, threshold)
    ]
    for found in everywhere(
        lambda: cpu.clip(weights, gradients, DECAYS, method, threshold)
    ).values():
        assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]
        assert [a.shape for a in found] == ODD


@pytest.mark.parametrize("backend", [reference, pytest.param(cpu, marks=needed)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_visible(backend, bad):
    gradients = [np.ones(3, np.float32), np.ones(20, np.float32)]
    gradients[1][7] = bad
    for method in METHODS[:2]:
        found = backend.clip([np.zeros_like(g) for g in gradients], gradients, [0, 0], method, 1.0)
        assert not np.isfinite(found[1]).all()
        assert np.isfinite(found[0]).all() == (method == "l2norm" or bad == np.inf)


@pytest.mark.parametrize("method", METHODS)
def test_clipping_is_what_it_says(method):
    weights, gradients = odd(0), odd(1)
    found = reference.clip(weights, gradients, DECAYS, method, 2.0)
    whole = [
        g.astype(np.float64) + d * w for w, g, d in zip(weights, gradients, DECAYS, strict=True)
    ]
    if method == "absolute-value":
        expected = [np.clip(g, -2, 2) for g in whole]
    else:
        norms = [np.linalg.norm(g) for g in whole]
        if method == "global-l2norm":
            norms = [math.hypot(*norms)] * len(norms)
        expected = [g * min(1, 2 / max(n, 1e-300)) for g, n in zip(whole, norms, strict=True)]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)
