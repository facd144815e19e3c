"""ReLU, leaky ReLU, tanh, sigmoid and softmax."""

import math

import numpy as np
import pytest
from op_references import Case, OpChecks, by_pixel, softmax_reference, torch_functions
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl.autodiff import tape


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
    dx = tape.backward(y, blocked(world, dy, batch=leaf.value.batch))[leaf]
    np.testing.assert_allclose(all_images(world, y.value), expected.detach().numpy(), rtol=1e-10)
    np.testing.assert_allclose(all_images(world, dx), variable.grad.numpy(), rtol=1e-9, atol=1e-13)
