"""Test arithmetic and elementwise ops on images and on learnables."""

import numpy as np
import pytest
from op_references import Case, OpChecks
from single_rank import numbers

import mpidl as dl


class TestArithmetic(OpChecks):
    """Checks of arithmetic ops. Each case runs with the fixture `world`."""

    cases = {
        "add": Case(dl.add, lambda a, b: a + b, [(3, 2), (3, 2)]),
        "add, broadcast": Case(dl.add, lambda a, b: a + b, [(3, 2, 2)], [(3, 1, 1)]),
        "operators": Case(
            lambda x, w: 2 - (-x) * w + x / 2 - 1 / (x + 3) + w - x,
            lambda x, w: 2 + x * w + x / 2 - 1 / (x + 3) + w - x,
            [(2, 3)],
            [(3,)],
        ),
        "subtract": Case(dl.subtract, lambda a, b: a - b, [(3,)], [(3,)]),
        "multiply": Case(dl.multiply, lambda a, b: a * b, [(3, 2), (3, 2)]),
        "multiply, broadcast": Case(dl.multiply, lambda a, b: a * b, [(3, 2, 2)], [(3, 1, 2)]),
        "multiply, gate of channels": Case(dl.multiply, lambda a, b: a * b, [(5, 3, 4), (5, 1, 1)]),
        "multiply, gate of features": Case(
            dl.multiply, lambda a, b: a * b[:, :, None, None], [(5, 3, 4), (5,)]
        ),
        "multiply, gate of pixels": Case(dl.multiply, lambda a, b: a * b, [(1, 3, 4), (5, 3, 4)]),
        "multiply, outer product": Case(dl.multiply, lambda a, b: a * b, [(5, 1, 1), (1, 3, 4)]),
        "multiply by itself": Case(lambda a: dl.multiply(a, a), lambda a: a * a, [(3, 2, 2)]),
        "multiply by a number": Case(dl.multiply, lambda a, b: a * b, [(3, 2)], [()]),
        "divide": Case(lambda a, b: dl.divide(a, b + 3), lambda a, b: a / (b + 3), [(3,)], [(3,)]),
        "power": Case(lambda a: (a + 2) ** 3, lambda a: (a + 2) * (a + 2) * (a + 2), [(3, 2)]),
        "exp, log, sqrt": Case(
            lambda a: dl.log(dl.sqrt(a + 2) + dl.exp(a)),
            lambda a: np.log((a + 2) ** 0.5 + np.e**a),
            [(4,)],
        ),
        "scale": Case(
            dl.scale,
            lambda x, s: x * s.reshape(1, -1, 1, 1),
            [(3, 2, 5)],
            [(3,)],
        ),
        "scale of features": Case(dl.scale, lambda x, s: x * s, [(4,)], [(4,)]),
        "negative": Case(dl.negative, lambda a: -a, [(2,)]),
    }
    errors = [
        (lambda x, f, i: dl.total(x), TypeError, "dl.sum and dl.mean"),
        (
            lambda x, f, i: dl.scale(x, np.ones(7, np.float32)),
            ValueError,
            r"scale: expected factors \(2,\) for x",
        ),
    ]


@pytest.mark.parametrize(
    "f, reference",
    [
        (lambda w: dl.total(w**2), lambda w: (w * w).sum()),
        (lambda w: dl.total(w, axis=(0, 2)), lambda w: np.einsum("ijk->j", w)),
        (lambda w: dl.total(dl.exp(w), axis=1), lambda w: np.exp(w).sum(axis=1)),
        (lambda w: dl.transpose(w), lambda w: np.einsum("ijk->kji", w)),
        (lambda w: dl.transpose(w, (1, 2, 0)), lambda w: np.einsum("ijk->jki", w)),
        (lambda w: dl.reshape(w, (6, 4)), lambda w: w.reshape(6, 4)),
        (lambda w: 2.0 / dl.sqrt(w + 3) - w**-2, lambda w: 2 / np.sqrt(w + 3) - 1 / (w * w)),
        (lambda w: w / dl.total(w) * 3, lambda w: w / w.sum() * 3),
    ],
)
def test_ops_on_learnables_alone(f, reference):
    w = numbers("replicated", 2, 3, 4, low=0.5)
    np.testing.assert_allclose(f(dl.Var(w)).value, reference(w), rtol=1e-13)
    assert dl.check_vjp(f, w) < 1e-7
