"""Test cross-channel (local response) normalization."""

import numpy as np
import pytest
from op_references import Case, OpChecks, torch_functions
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl.core import tape


def norm_reference(x, before, after, a, beta, k):
    y = np.empty_like(x)
    for c in range(x.shape[1]):
        window = x[:, max(0, c - before) : c + after + 1]
        y[:, c] = x[:, c] / (k + a * np.square(window).sum(axis=1)) ** beta
    return y


class TestCrossChannelNorm(OpChecks):
    unused_lanes = 1e3  # value in unused lanes; the square of a very large value would overflow
    cases = {
        "odd window": Case(
            lambda x: dl.cross_channel_norm(3 * x, 5),
            lambda x: norm_reference(3 * x, 2, 2, 1e-4 / 5, 0.75, 2.0),
            [(7, 2, 3)],
        ),
        "even window": Case(
            lambda x: dl.cross_channel_norm(x, 4, alpha=3.0, beta=0.6, k=0.5),
            lambda x: norm_reference(x, 1, 2, 0.75, 0.6, 0.5),
            [(7, 2, 2)],
        ),
        "window wider than the channels": Case(
            lambda x: dl.cross_channel_norm(x, 20, alpha=10.0, k=1.0),
            lambda x: norm_reference(x, 9, 10, 0.5, 0.75, 1.0),
            [(3,)],
        ),
    }
    errors = [
        (lambda x, f, i: dl.cross_channel_norm(x, 0), ValueError, "window must be an integer >= 1"),
        (lambda x, f, i: dl.cross_channel_norm(x, 5, k=0), ValueError, "k > 0"),
    ]


@pytest.mark.parametrize("beta", [0.75, 0.5])
@pytest.mark.parametrize("window", [1, 3, 5])
def test_against_pytorch(world, window, beta):
    torch, functional = torch_functions()
    x, dy = numbers("x", 20, 7, 3, 2), numbers("dy", 20, 7, 3, 2)
    variable = torch.tensor(x, requires_grad=True)
    expected = functional.local_response_norm(variable, window, alpha=0.3, beta=beta, k=1.5)
    expected.backward(torch.tensor(dy))
    value = blocked(world, x)
    leaf = dl.Var(value)
    y = dl.cross_channel_norm(leaf, window, alpha=0.3, beta=beta, k=1.5)
    np.testing.assert_allclose(all_images(world, y.value), expected.detach().numpy(), rtol=1e-12)
    dx = tape.backward(y, blocked(world, dy, batch=value.batch))[leaf]
    np.testing.assert_allclose(all_images(world, dx), variable.grad.numpy(), rtol=1e-11)
