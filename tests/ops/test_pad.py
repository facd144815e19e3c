"""Compare padding with NumPy in float64, and test its gradient and errors."""

import numpy as np
import pytest
from op_references import Case, OpChecks

import mpidl as dl


def cropped(x, sides):
    (top, bottom), (left, right) = sides
    return x[:, :, top : x.shape[2] - bottom, left : x.shape[3] - right]


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
        "fewer rows and columns": Case(
            lambda x: dl.pad2d(x, ((-2, -1), (0, -3))),
            lambda x: cropped(x, ((2, 1), (0, 3))),
            [(2, 5, 4)],
        ),
        "a border on one side alone": Case(
            lambda x: dl.pad2d(x, ((-1, 2), (3, -2)), value=0.5),
            lambda x: padded(cropped(x, ((1, 0), (0, 2))), ((0, 2), (3, 0)), 0.5),
            [(2, 3, 4)],
        ),
        "nothing": Case(lambda x: dl.pad2d(x, 0), lambda x: x, [(2, 3, 3)]),
    }
    errors = [
        (lambda x, f, i: dl.pad2d(f, 1), ValueError, "expected x of shape"),
        (lambda x, f, i: dl.pad2d(x, 0.5), ValueError, "padding must be an integer, "),
        (lambda x, f, i: dl.pad2d(x, -9), ValueError, "padding -9 leaves no pixels of images"),
        (lambda x, f, i: dl.pad2d(x, 1, value=np.nan), ValueError, "value must be a finite number"),
    ]


def test_the_layer():
    net = dl.Network([dl.Pad2D(((1, 2), (0, 3)), 0.5)], (2, 4, 5))
    assert net.layer_names == ["pad1"]
    assert net.output_shape == (2, 7, 8)
    assert dl.Network.from_spec(net.spec(), (2, 4, 5)).output_shape == (2, 7, 8)
    assert dl.Network([dl.Pad2D(((-3, 0), (0, -4)))], (2, 4, 5)).output_shape == (2, 1, 1)
    for sides in (((-4, 3), (0, 0)), ((0, 0), (-2, -3))):  # what is left is not of the images
        with pytest.raises(ValueError, match=r"pad1: padding .* leaves no pixels of images"):
            dl.Network([dl.Pad2D(sides)], (2, 4, 5))
    with pytest.raises(ValueError, match=r"pad1: expected images \(C, H, W\), got \(3,\)"):
        dl.Network([dl.Pad2D(1)], (3,))
