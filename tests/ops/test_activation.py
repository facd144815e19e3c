"""Test the ops of activation functions."""

import math

import numpy as np
import pytest
from op_references import Case, OpChecks, by_pixel, softmax_reference, torch_functions
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl.core import tape


def softmax_of_pixels_reference(x):
    scores = softmax_reference(by_pixel(x)).reshape(len(x), *x.shape[2:], x.shape[1])
    return np.moveaxis(scores, -1, 1)


class TestActivation(OpChecks):
    cases = {
        "relu": Case(dl.relu, lambda x: x * (x > 0), [(3, 2, 2)]),
        "leaky_relu": Case(
            lambda x: dl.leaky_relu(x, 0.2), lambda x: x * (x > 0) + 0.2 * x * (x < 0), [(3, 2, 2)]
        ),
        "tanh": Case(
            lambda x: dl.tanh(5 * x),
            lambda x: (np.e ** (10 * x) - 1) / (np.e ** (10 * x) + 1),
            [(3, 4)],
        ),
        "sigmoid": Case(lambda x: dl.sigmoid(4 * x), lambda x: 1 / (1 + np.e ** (-4 * x)), [(7,)]),
        "gelu": Case(
            lambda x: dl.gelu(4 * x),
            lambda x: 2 * x * np.vectorize(math.erfc)(-2 * np.sqrt(2) * x),
            [(3, 4)],
        ),
        "gelu, tanh": Case(
            lambda x: dl.gelu(3 * x, "tanh"),
            lambda x: 1.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (3 * x + 0.044715 * 27 * x**3))),
            [(3, 2, 2)],
        ),
        "swish": Case(
            lambda x: dl.swish(4 * x), lambda x: 4 * x / (1 + np.e ** (-4 * x)), [(3, 2, 2)]
        ),
        "clip": Case(
            lambda x: dl.clip(x, -0.3, 0.5),
            lambda x: -0.3 * (x <= -0.3) + x * (-0.3 < x) * (x < 0.5) + 0.5 * (x >= 0.5),
            [(3, 4)],
        ),
        "clip, one bound": Case(
            lambda x: dl.clip(x, -0.3, math.inf),
            lambda x: -0.3 * (x <= -0.3) + x * (x > -0.3),
            [(7,)],
        ),
        "hard_sigmoid": Case(
            lambda x: dl.hard_sigmoid(5 * x, 0.3, 0.6),
            lambda x: (1.5 * x + 0.6) * (-0.4 < x) * (x < 4 / 15) + (x >= 4 / 15),
            [(3, 2, 2)],
        ),
        "hard_swish": Case(
            lambda x: dl.hard_swish(5 * x),
            lambda x: 5 * x * ((x + 0.6) / 1.2 * (-0.6 < x) * (x < 0.6) + (x >= 0.6)),
            [(3, 4)],
        ),
        "prelu": Case(
            dl.prelu,
            lambda x, s: x * (x > 0) + x * (x <= 0) * s.reshape(1, -1, 1, 1),
            [(3, 2, 2)],
            [(3,)],
        ),
        "prelu of features": Case(
            dl.prelu, lambda x, s: x * (x > 0) + x * (x <= 0) * s, [(4,)], [(4,)]
        ),
        "prelu, one slope": Case(
            dl.prelu, lambda x, s: x * (x > 0) + x * (x <= 0) * s[0], [(3, 2, 5)], [(1,)]
        ),
        "softmax": Case(dl.softmax, softmax_reference, [(6,)]),
        "softmax of pixels": Case(dl.softmax, softmax_of_pixels_reference, [(4, 3, 6)]),
    }
    errors = [
        (lambda x, f, i: dl.leaky_relu(x, -0.1), ValueError, "scale must be a number >= 0, got -0"),
        (
            lambda x, f, i: dl.gelu(x, True),
            ValueError,
            "gelu: approximate must be 'none' or 'tanh'",
        ),
        (lambda x, f, i: dl.softmax(i), ValueError, r"softmax: expected \(N, K\) or"),
        (lambda x, f, i: dl.clip(x, 1, 0), ValueError, "clip: expected numbers low < high"),
        (lambda x, f, i: dl.clip(x, -math.inf, math.inf), ValueError, "at least one of them"),
        (lambda x, f, i: dl.hard_sigmoid(x, 0), ValueError, "finite numbers alpha > 0 and beta"),
        (
            lambda x, f, i: dl.prelu(x, np.ones(7, np.float32)),
            ValueError,
            r"prelu: expected slopes \(1,\) or",
        ),
    ]


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "leaky_relu"])
def test_against_pytorch(world, name):
    torch, functional = torch_functions()
    x = numbers("x", 20, 50, low=-20, high=20)
    expected = getattr(functional if name == "leaky_relu" else torch, name)(torch.tensor(x))
    y = all_images(world, getattr(dl, name)(blocked(world, x)))
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-13)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_against_pytorch(world, approximate):
    torch, functional = torch_functions()
    x, dy = numbers("x", 20, 50, low=-5, high=5), numbers("dy", 20, 50)
    variable = torch.tensor(x, requires_grad=True)
    expected = functional.gelu(variable, approximate=approximate)
    expected.backward(torch.tensor(dy))
    leaf = dl.Var(blocked(world, x), name="x")
    y = dl.gelu(leaf, approximate)
    result = all_images(world, y.value)
    dx = tape.backward(y, blocked(world, dy, batch=leaf.value.batch))[leaf]
    # PyTorch's tanh approximation loses digits by cancellation if the result is small
    np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-10, atol=1e-15)
    np.testing.assert_allclose(all_images(world, dx), variable.grad.numpy(), rtol=1e-9, atol=1e-13)


PYTORCH = {
    "swish": (lambda x: dl.swish(x), lambda f, x: f.silu(x)),
    "clip": (lambda x: dl.clip(x, -1, 2), lambda f, x: f.hardtanh(x, -1, 2)),
    "hard_sigmoid": (lambda x: dl.hard_sigmoid(x), lambda f, x: f.hardsigmoid(x)),
    "hard_swish": (lambda x: dl.hard_swish(x), lambda f, x: f.hardswish(x)),
}


@pytest.mark.parametrize("name", PYTORCH)
def test_newer_activations_against_pytorch(world, name):
    """The gradient also equals PyTorch's at the bounds of the range, -1 and 2."""
    torch, functional = torch_functions()
    function, torch_function = PYTORCH[name]
    x, dy = numbers("x", 20, 50, low=-6, high=6), numbers("dy", 20, 50)
    if name == "clip":
        x[:, :2] = -1, 2
    variable = torch.tensor(x, requires_grad=True)
    expected = torch_function(functional, variable)
    expected.backward(torch.tensor(dy))
    leaf = dl.Var(blocked(world, x), name="x")
    y = function(leaf)
    result = all_images(world, y.value)
    dx = tape.backward(y, blocked(world, dy, batch=leaf.value.batch))[leaf]
    np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-10)
    # PyTorch's hardsigmoid multiplies gradients by 1 / 6 in float32
    tolerance = 1e-7 if name == "hard_sigmoid" else 1e-9
    dx, expected = all_images(world, dx), variable.grad.numpy()
    np.testing.assert_allclose(dx, expected, rtol=tolerance, atol=1e-13)


@pytest.mark.parametrize("slopes", [1, 5])
def test_prelu_against_pytorch(world, slopes):
    torch, functional = torch_functions()
    x, dy, slope = numbers("x", 37, 5, 3, 2), numbers("dy", 37, 5, 3, 2), numbers("s", slopes)
    leaves = [torch.tensor(v, requires_grad=True) for v in (x, slope)]
    functional.prelu(*leaves).backward(torch.tensor(dy))
    arguments = dl.Var(blocked(world, x), name="x"), dl.Var(slope, name="slope")
    y = dl.prelu(*arguments)
    gradients = tape.backward(y, blocked(world, dy, batch=arguments[0].value.batch))
    dslope = world.gplus(gradients[arguments[1]])
    np.testing.assert_allclose(dslope, leaves[1].grad.numpy(), rtol=1e-12)
    dx = all_images(world, gradients[arguments[0]])
    np.testing.assert_allclose(dx, leaves[0].grad.numpy(), rtol=1e-12)


def test_infinities_and_nan(world):
    x = np.array([[-np.inf, -1e30, -100, 100, 1e30, np.inf, np.nan]], np.float32)
    y = all_images(world, dl.swish(blocked(world, x)))[0]
    assert np.isnan(y[-1])
    np.testing.assert_allclose(y[:-1], [0, 0, 0, 100, 1e30, np.inf], atol=1e-40)
    clipped = all_images(world, dl.clip(blocked(world, x), -2, np.inf))[0]
    assert np.isnan(clipped[-1]) and np.array_equal(clipped[:-1], [-2] * 3 + list(x[0, 3:6]))
