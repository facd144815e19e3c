"""Compare padding with NumPy in float64, and test its gradient and errors."""

import numpy as np
import pytest
from op_references import Case, OpChecks

import mpidl as dl


def padded(x, sides, value):
    return np.pad(x, ((0, 0), (0, 0), *sides), constant_values=value)


class TestPad(OpChecks):
    cases = {
        "a border": Case(
            lambda x: dl.pad2d(x, 1), lambda x: padded(x, ((1, 1), (1, 1)), 0), [(3, 4, 5)]
        ),
        "a value": Case(
            lambda x: dl.pad2d(x, ((1, 0), (2, 3)), value=-0.5),
            lambda x: padded(x, ((1, 0), (2, 3)), -0.5),
            [(4, 2, 3)],
        ),
        "nothing": Case(lambda x: dl.pad2d(x, 0), lambda x: x, [(2, 3, 3)]),
    }
    errors = [
        (lambda x, f, i: dl.pad2d(f, 1), ValueError, "expected x of shape"),
        (lambda x, f, i: dl.pad2d(x, -1), ValueError, "padding must be an integer >= 0"),
        (lambda x, f, i: dl.pad2d(x, 1, value=np.nan), ValueError, "value must be a finite number"),
    ]


def test_the_layer():
    net = dl.Network([dl.Pad2D(((1, 2), (0, 3)), 0.5)], (2, 4, 5))
    assert net.layer_names == ["pad1"]
    assert net.output_shape == (2, 7, 8)
    assert dl.Network.from_spec(net.spec(), (2, 4, 5)).output_shape == (2, 7, 8)
    with pytest.raises(ValueError, match=r"pad1: expected images \(C, H, W\), got \(3,\)"):
        dl.Network([dl.Pad2D(1)], (3,))
