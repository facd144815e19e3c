"""Test layer, group and instance normalization."""

import numpy as np
import pytest
from op_references import Case, OpChecks, torch_functions
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl.core import tape


def normalized(sets, epsilon=1e-5):
    """Normalize each row of a matrix."""
    mean = sets.mean(axis=1, keepdims=True)
    variance = np.square(sets - mean).mean(axis=1, keepdims=True)
    return (sets - mean) / np.sqrt(variance + epsilon)


def per_channel(vector, x):
    return vector.reshape(-1, *(1,) * (x.ndim - 2))


def pixels_reference(x, gamma=None, beta=None):
    last = np.moveaxis(x, 1, -1)
    y = np.moveaxis(normalized(last.reshape(-1, x.shape[1])).reshape(last.shape), -1, 1)
    return y if gamma is None else y * per_channel(gamma, x) + per_channel(beta, x)


def groups_reference(x, groups, gamma=None, beta=None, epsilon=1e-5):
    y = normalized(x.reshape(len(x) * groups, -1), epsilon).reshape(x.shape)
    return y if gamma is None else y * per_channel(gamma, x) + per_channel(beta, x)


class TestGroupNorm(OpChecks):
    cases = {
        "layer_norm": Case(dl.layer_norm, pixels_reference, [(5, 2, 3)], [(5,), (5,)]),
        "layer_norm of features": Case(dl.layer_norm, pixels_reference, [(7,)], [(7,), (7,)]),
        "layer_norm without factors": Case(dl.layer_norm, pixels_reference, [(3, 2, 2)]),
        "layer_norm of images": Case(
            lambda x, gamma, beta: dl.layer_norm(x, gamma, beta, over="image"),
            lambda x, gamma, beta: (
                normalized(x.reshape(len(x), -1)).reshape(x.shape) * gamma + beta
            ),
            [(3, 2, 4)],
            [(3, 2, 4), (3, 2, 4)],
        ),
        "group_norm": Case(
            lambda x, gamma, beta: dl.group_norm(x, gamma, beta, groups=2, epsilon=1e-3),
            lambda x, gamma, beta: groups_reference(x, 2, gamma, beta, 1e-3),
            [(6, 2, 3)],
            [(6,), (6,)],
        ),
        "group_norm of features": Case(
            lambda x: dl.group_norm(x, groups=2), lambda x: groups_reference(x, 2), [(8,)]
        ),
        "instance_norm": Case(
            dl.instance_norm,
            lambda x, gamma, beta: groups_reference(x, 3, gamma, beta),
            [(3, 4, 3)],
            [(3,), (3,)],
        ),
    }
    variants = ("layer_norm without factors", "group_norm of features")
    errors = [
        (lambda x, f, i: dl.layer_norm(x, np.ones(3), np.ones(3)), ValueError, r"beta \(2,\)"),
        (lambda x, f, i: dl.layer_norm(x, np.ones(2)), ValueError, "or neither of them"),
        (lambda x, f, i: dl.layer_norm(x, over="rows"), ValueError, "'channels' or 'image'"),
        (lambda x, f, i: dl.layer_norm(x, epsilon=0), ValueError, "epsilon must be a number > 0"),
        (
            lambda x, f, i: dl.layer_norm(i),
            ValueError,
            r"layer_norm: expected x of shape \(N, C, H",
        ),
        (lambda x, f, i: dl.group_norm(x, groups=3), ValueError, "3 groups do not divide the 2"),
        (lambda x, f, i: dl.group_norm(x, groups=0), ValueError, "groups must be an integer >= 1"),
        (lambda x, f, i: dl.group_norm(f, groups=3), ValueError, "more than one number per group"),
        (lambda x, f, i: dl.instance_norm(f), ValueError, "instance_norm: expected more than one"),
    ]


# {name: (image, op, PyTorch's function of (functional, x, gamma, beta), gamma per element)}
PYTORCH = {
    "pixels": (
        (24, 9, 7),
        lambda *a: dl.layer_norm(*a, epsilon=1e-6),
        lambda f, x, *a: f.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], *a, 1e-6).permute(
            0, 3, 1, 2
        ),
        False,
    ),
    "many channels": (
        (768, 2, 2),
        lambda *a: dl.layer_norm(*a, epsilon=1e-6),
        lambda f, x, *a: f.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], *a, 1e-6).permute(
            0, 3, 1, 2
        ),
        False,
    ),
    "features": (
        (100,),
        lambda *a: dl.layer_norm(*a),
        lambda f, x, *a: f.layer_norm(x, x.shape[1:], *a),
        False,
    ),
    "image": (
        (6, 9, 7),
        lambda *a: dl.layer_norm(*a, over="image"),
        lambda f, x, *a: f.layer_norm(x, x.shape[1:], *a),
        True,
    ),
    "groups": (
        (24, 9, 7),
        lambda *a: dl.group_norm(*a, groups=8),
        lambda f, x, *a: f.group_norm(x, 8, *a),
        False,
    ),
    "channels": (
        (8, 28, 27),
        lambda *a: dl.instance_norm(*a),
        lambda f, x, gamma, beta: f.instance_norm(x, weight=gamma, bias=beta),
        False,
    ),
}


def of_pytorch(torch, function, arrays, dy, dtype):
    """Return PyTorch's result and gradients, in float64."""
    leaves = [torch.tensor(v, dtype=dtype, requires_grad=True) for v in arrays]
    y = function(torch.nn.functional, *leaves)
    y.backward(torch.tensor(dy, dtype=dtype))
    return [v.detach().double().numpy() for v in (y, *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize("name", PYTORCH)
def test_against_pytorch(world, name):
    """In float32, errors are at most 3 times those of PyTorch's own float32."""
    torch, _ = torch_functions()
    image, op, function, of_elements = PYTORCH[name]
    factors = image if of_elements else image[:1]
    x, dy = (numbers(n, 37, *image, dtype=np.float32) for n in ("x", "dy"))
    x += np.float32(0.5)
    arrays = x, numbers("gamma", *factors, dtype=np.float32), numbers("beta", *factors, dtype="f4")
    exact, single = (
        of_pytorch(torch, function, arrays, dy, dtype) for dtype in (torch.float64, torch.float32)
    )
    leaves = [dl.Var(blocked(world, x)), *map(dl.Var, arrays[1:])]
    y = op(*leaves)
    result = all_images(world, y.value)
    gradients = tape.backward(y, blocked(world, dy, batch=leaves[0].value.batch))
    of_learnables = [world.gplus(gradients[leaf]) for leaf in leaves[1:]]
    actual = result, all_images(world, gradients[leaves[0]]), *of_learnables
    errors = [
        [abs(v - e).max() / abs(e).max() for v, e in zip(values, exact, strict=True)]
        for values in (actual, single)
    ]
    assert errors[0][0] <= 1e-6
    for error, of_torch in zip(*errors, strict=True):
        assert error <= 3 * of_torch, errors
