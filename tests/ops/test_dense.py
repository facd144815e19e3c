"""Test the dense and flatten ops."""

import numpy as np
from op_references import Case, OpChecks

import mpidl as dl


def dense_reference(x, weight, bias):
    y = np.empty((len(x), len(weight)))
    for i, k in np.ndindex(y.shape):
        y[i, k] = sum(x[i, f] * weight[k, f] for f in range(x.shape[1])) + bias[k]
    return y


class TestDense(OpChecks):
    """Checks of `dense` and `flatten`. Each case runs with the fixture `world`."""

    cases = {
        "dense": Case(dl.dense, dense_reference, [(7,)], [(4, 7), (4,)]),
        "dense to one": Case(dl.dense, dense_reference, [(5,)], [(1, 5), (1,)]),
        "flatten": Case(dl.flatten, lambda x: x.reshape(len(x), -1), [(2, 3, 4)]),
    }
    errors = [
        (lambda x, f, i: dl.dense(x, np.ones((2, 3)), np.ones(2)), ValueError, "dense: expected"),
        (lambda x, f, i: dl.dense(f, np.ones((2, 4)), np.ones(2)), ValueError, r"weight \(K, 3\)"),
    ]
