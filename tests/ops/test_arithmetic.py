"""Test arithmetic and elementwise ops on images and on learnables."""

import numpy as np
import pytest
from op_references import Case, OpChecks, torch_functions
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl.core import tape


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


GATES = {
    "channels": ((37, 24, 14, 14), (37, 24, 1, 1)),
    "pixels": ((37, 96, 7, 7), (37, 1, 7, 7)),
    "equal": ((37, 5, 9, 9), (37, 5, 9, 9)),
    "a factor per channel": ((37, 24, 14, 14), (24,)),
}


@pytest.mark.parametrize("name", GATES)
def test_float32_gates_are_as_accurate_as_those_of_pytorch(world, name):
    """Errors are relative to PyTorch's float64 results."""
    torch, _ = torch_functions()
    shapes = GATES[name]
    arrays = [numbers(f"gate {i}", *shape, low=-2, high=3) for i, shape in enumerate(shapes)]
    is_scale, dy = len(shapes[1]) == 1, numbers("gate dy", *shapes[0], low=-2, high=3)
    results = []
    for dtype in (torch.float64, torch.float32):
        a, b = (torch.tensor(v, dtype=dtype, requires_grad=True) for v in arrays)
        y = a * (b[:, None, None] if is_scale else b)
        y.backward(torch.tensor(dy, dtype=dtype))
        results.append([v.detach().double().numpy() for v in (y, a.grad, b.grad)])
    single = [np.float32(v) for v in arrays]
    a = dl.Var(blocked(world, single[0]))
    batch = a.value.batch
    b = dl.Var(single[1] if is_scale else blocked(world, single[1], batch=batch))
    y = (dl.scale if is_scale else dl.multiply)(a, b)
    result = all_images(world, y.value)
    gradients = tape.backward(y, blocked(world, np.float32(dy), batch=batch))
    db = world.gplus(gradients[b]) if is_scale else all_images(world, gradients[b])
    ours = result, all_images(world, gradients[a]), db
    for value, exact, rounded in zip(ours, *results, strict=True):
        largest = abs(exact).max()
        error, of_torch = (abs(v - exact).max() / largest for v in (value, rounded))
        assert error <= min(1e-6, max(3 * of_torch, 2.0**-24)), (error, of_torch)


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
