"""Test the recurrent ops against NumPy and PyTorch."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from op_references import Case, OpChecks, torch_functions
from single_rank import SingleRank, all_images, blocked, numbers

import mpidl as dl
from mpidl import backends
from mpidl.core import tape

GATES = {"lstm": 4, "gru": 3}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm_reference(x, weight, recurrent, bias, hidden, cell, reverse=False):
    outputs = np.empty((len(x), hidden.shape[1], x.shape[2], 1))
    rows = range(x.shape[2])
    for row in reversed(rows) if reverse else rows:
        sums = np.einsum("ncw,kcw->nk", x[:, :, row], weight[:, :, 0]) + bias
        sums = sums + hidden @ recurrent[:, :, 0, 0].T
        i, f, g, o = np.split(sums, 4, axis=1)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(cell)
        outputs[:, :, row, 0] = hidden
    return outputs


def gru_reference(x, weight, recurrent, bias, recurrent_bias, hidden, reverse=False):
    outputs = np.empty((len(x), hidden.shape[1], x.shape[2], 1))
    rows = range(x.shape[2])
    for row in reversed(rows) if reverse else rows:
        of_x = np.einsum("ncw,kcw->nk", x[:, :, row], weight[:, :, 0]) + bias
        of_state = hidden @ recurrent[:, :, 0, 0].T + recurrent_bias
        (r, z, n), (p_r, p_z, p_n) = (np.split(v, 3, axis=1) for v in (of_x, of_state))
        candidate = np.tanh(n + sigmoid(r + p_r) * p_n)
        hidden = candidate + sigmoid(z + p_z) * (hidden - candidate)
        outputs[:, :, row, 0] = hidden
    return outputs


def lstm_from_state(x, hidden, cell, *learnables, **options):
    return dl.lstm(x, *learnables, state=(hidden, cell), **options)[0]


def gru_from_state(x, hidden, *learnables, **options):
    return dl.gru(x, *learnables, state=(hidden,), **options)[0]


def shapes(kind, units, channels, columns, biases):
    gates = GATES[kind] * units
    return [(gates, channels, 1, columns), (gates, units, 1, 1), *[(gates,)] * biases]


def zeros(x, recurrent):
    return np.zeros((len(x), recurrent.shape[1]))


class TestRecurrent(OpChecks):
    cases = {
        "lstm": Case(
            lambda x, w, r, b: dl.lstm(x, w, r, b)[0],
            lambda x, w, r, b: lstm_reference(x, w, r, b, zeros(x, r), zeros(x, r)),
            [(3, 4, 2)],
            shapes("lstm", 5, 3, 2, 1),
        ),
        "lstm from a state": Case(
            lstm_from_state,
            lambda x, h, c, w, r, b: lstm_reference(x, w, r, b, h, c),
            [(1, 5, 3), (3,), (3,)],
            shapes("lstm", 3, 1, 3, 1),
        ),
        "lstm in reverse": Case(
            lambda *a: lstm_from_state(*a, reverse=True),
            lambda x, h, c, w, r, b: lstm_reference(x, w, r, b, h, c, reverse=True),
            [(2, 3, 1), (4,), (4,)],
            shapes("lstm", 4, 2, 1, 1),
        ),
        "lstm without bias, one step": Case(
            lambda x, w, r: dl.lstm(x, w, r)[0],
            lambda x, w, r: lstm_reference(x, w, r, 0, zeros(x, r), zeros(x, r)),
            [(2, 1, 3)],
            shapes("lstm", 1, 2, 3, 0),
        ),
        "the last step of an lstm in reverse": Case(
            lambda x, w, r, b: dl.lstm(x, w, r, b, returns="last", reverse=True)[0],
            lambda x, w, r, b: lstm_reference(x, w, r, b, zeros(x, r), zeros(x, r), reverse=True)[
                :, :, 0, 0
            ],
            [(1, 4, 3)],
            shapes("lstm", 3, 1, 3, 1),
        ),
        "gru": Case(
            lambda x, w, r, b, c: dl.gru(x, w, r, b, c)[0],
            lambda x, w, r, b, c: gru_reference(x, w, r, b, c, zeros(x, r)),
            [(3, 4, 2)],
            shapes("gru", 5, 3, 2, 2),
        ),
        "gru from a state": Case(
            gru_from_state,
            lambda x, h, w, r, b, c: gru_reference(x, w, r, b, c, h),
            [(1, 5, 3), (3,)],
            shapes("gru", 3, 1, 3, 2),
        ),
        "gru in reverse": Case(
            lambda *a: gru_from_state(*a, reverse=True),
            lambda x, h, w, r, b, c: gru_reference(x, w, r, b, c, h, reverse=True),
            [(2, 3, 1), (4,)],
            shapes("gru", 4, 2, 1, 2),
        ),
    }
    variants = ("lstm in reverse", "gru in reverse", "lstm without bias, one step")
    errors = [
        (
            lambda x, f, i: dl.lstm(x, np.ones((8, 2, 1, 4)), np.ones((8, 3, 1, 1))),
            ValueError,
            r"lstm: expected weight \(4\*units, 2, 1, 4\) and recurrent_weight .* got",
        ),
        (
            lambda x, f, i: dl.gru(x, np.ones((6, 2, 1, 4)), np.ones((6, 2, 1, 1)), np.ones(3)),
            ValueError,
            r"gru: expected a bias \(6,\), got \(3,\)",
        ),
        (
            lambda x, f, i: dl.lstm(x, np.ones((8, 2, 1, 4)), np.ones((8, 2, 1, 1)), state=(f,)),
            ValueError,
            r"lstm: expected a state \(hidden, cell\), got 1 values",
        ),
        (
            lambda x, f, i: dl.gru(x, np.ones((6, 2, 1, 4)), np.ones((6, 2, 1, 1)), state=(f,)),
            ValueError,
            r"gru: expected a state of shape \(\d+, 2\), got \(\d+, 3\)",
        ),
        (
            lambda x, f, i: dl.gru(x, np.ones((6, 2, 1, 4)), np.ones((6, 2, 1, 1)), state=(f, f)),
            ValueError,
            r"gru: expected a state \(hidden,\), got 2 values",
        ),
        (
            lambda x, f, i: dl.gru(x, np.ones((6, 2, 1, 4)), np.ones((6, 2, 1, 1)), state=f),
            TypeError,
            r"gru: expected a state \(hidden,\), got one Blocked",
        ),
        (
            lambda x, f, i: dl.gru(x, np.ones((6, 2, 1, 4)), np.ones((6, 2, 1, 1)), truncate=0),
            ValueError,
            "gru: truncate must be an integer >= 1",
        ),
        (
            lambda x, f, i: dl.gru(x, np.ones((6, 2, 1, 4)), np.ones((6, 2, 1, 1)), returns="all"),
            ValueError,
            "gru: returns must be 'sequence' or 'last', got 'all'",
        ),
        (lambda x, f, i: dl.lstm(f, np.ones(3), np.ones(3)), ValueError, "lstm: expected"),
    ]


def of_pytorch(torch, kind, arrays, dy, dtype):
    """Return the result and the gradients of PyTorch's layer, in float64."""
    x, hidden, cell, weight, recurrent, bias, recurrent_bias = arrays
    module = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind]
    layer = module(weight[0].size, hidden.shape[1], batch_first=True, dtype=dtype)
    values = weight.reshape(len(weight), -1), recurrent[:, :, 0, 0], bias, recurrent_bias
    with torch.no_grad():
        for learnable, value in zip(layer.parameters(), values, strict=True):
            learnable.copy_(torch.tensor(value))
    rows = np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(len(x), x.shape[2], -1)
    leaves = [torch.tensor(v, dtype=dtype, requires_grad=True) for v in (rows, hidden, cell)]
    state = tuple(v[None] for v in leaves[1:])
    y, _ = layer(leaves[0], state if kind == "lstm" else state[0])
    y.backward(torch.tensor(dy[..., 0].transpose(0, 2, 1), dtype=dtype))
    dx = leaves[0].grad.reshape(len(x), x.shape[2], x.shape[1], -1).permute(0, 2, 1, 3)
    used = leaves[1:] if kind == "lstm" else leaves[1:2]
    gradients = dx, *(v.grad for v in used), *(v.grad for v in layer.parameters())
    return [v.detach().double().numpy() for v in (y.permute(0, 2, 1)[..., None], *gradients)]


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("units, steps, image", [(33, 28, (1, 28)), (64, 9, (20, 1))])
def test_against_pytorch(world, kind, units, steps, image):
    """In float32, errors are at most 3 times those of PyTorch's own float32."""
    torch, _ = torch_functions()
    gates, columns = GATES[kind] * units, (image[0], steps, image[1])
    x, dy = (numbers(n, 37, *s, dtype="f4") for n, s in (("x", columns), ("dy", (units, steps, 1))))
    hidden, cell = (numbers(n, 37, units, dtype="f4") for n in ("hidden", "cell"))
    weight = numbers("weight", gates, image[0], 1, image[1], dtype="f4") / 4
    recurrent = numbers("recurrent", gates, units, 1, 1, dtype="f4") / 4
    bias, recurrent_bias = (numbers(n, gates, dtype="f4") for n in ("bias", "recurrent bias"))
    if kind == "lstm":  # has one bias, the sum of PyTorch's two
        recurrent_bias = np.zeros_like(recurrent_bias)
    arrays = x, hidden, cell, weight, recurrent, bias, recurrent_bias
    exact, single = (
        of_pytorch(torch, kind, arrays, dy, dtype) for dtype in (torch.float64, torch.float32)
    )
    state = (hidden, cell) if kind == "lstm" else (hidden,)
    learnables = arrays[3:6] if kind == "lstm" else arrays[3:]
    values = [dl.Var(v) for v in blocked(world, x, *state)]
    leaves = [dl.Var(v) for v in learnables]
    function = lstm_from_state if kind == "lstm" else gru_from_state
    y = function(*values, *leaves)
    result = all_images(world, y.value)
    gradients = tape.backward(y, blocked(world, dy, batch=y.value.batch))
    actual = [result, *(all_images(world, gradients[v]) for v in values)]
    actual += [world.gplus(gradients[v]) for v in leaves]
    names = "y", "dx", "dhidden", "dcell", "dweight", "drecurrent", "dbias", "drecurrent_bias"
    for name, value, reference, other in zip(names, actual, exact, single, strict=False):
        value = value.reshape(reference.shape)
        error, of_torch = (abs(v - reference).max() / abs(reference).max() for v in (value, other))
        bound = 1e-6 if name == "y" else 3 * of_torch
        assert error <= bound, (name, error, of_torch)


@pytest.mark.parametrize("kind", GATES)
def test_the_state_continues_a_sequence(world, kind):
    """A sequence in two parts gives the bytes of one part, if the second starts with the state."""
    units, images = 6, numbers("x", 20, 2, 9, 3, dtype="f4")
    learnables = [
        numbers(f"{i}", *s, dtype="f4") for i, s in enumerate(shapes(kind, units, 2, 3, 1))
    ]
    function = getattr(dl, kind)
    complete, state = function(blocked(world, images), *learnables)
    first, between = function(blocked(world, images[:, :, :4]), *learnables)
    second, last = function(blocked(world, images[:, :, 4:]), *learnables, state=between)
    parts = np.concatenate([all_images(world, v) for v in (first, second)], axis=2)
    assert parts.tobytes() == all_images(world, complete).tobytes()
    for a, b in zip(state, last, strict=True):
        assert all_images(world, a).tobytes() == all_images(world, b).tobytes()
    restarted, _ = function(blocked(world, images[:, :, 4:]), *learnables)
    assert all_images(world, restarted).tobytes() != all_images(world, second).tobytes()


@pytest.mark.parametrize("kind", GATES)
def test_a_state_of_other_images_of_the_rank_is_refused(kind):
    """Kernels would read past its end."""
    learnables = [np.ones(s, np.float32) for s in shapes(kind, 4, 1, 3, 1)]
    thirds = dl.share(48, SimpleNamespace(rank=0, size=3))
    x = blocked(SingleRank(), np.ones((48, 1, 2, 3), np.float32))
    state = [dl.from_images(np.ones((16, 4), np.float32), thirds)] * (2 if kind == "lstm" else 1)
    message = r"expected a state divided .* \(\(0, 3\),\), got \(\(0, 1\), \(1, 2\), \(2, 3\)\)"
    with pytest.raises(ValueError, match=message):
        getattr(dl, kind)(x, *learnables, state=state)


@pytest.mark.parametrize("kind", GATES)
def test_a_state_in_float64_is_rounded(world, kind):
    """NumPy creates zeros in float64, and the state may be differentiated."""
    images, states = numbers("x", 20, 1, 2, 3, dtype="f4"), 2 if kind == "lstm" else 1
    learnables = [numbers(f"{i}", *s, dtype="f4") for i, s in enumerate(shapes(kind, 4, 1, 3, 1))]
    hidden = numbers("h", 20, 4, dtype="f4")
    results = []
    for dtype in (np.float32, np.float64):
        x, h = blocked(world, images, hidden.astype(dtype))
        h = dl.Var(h)
        y, _ = getattr(dl, kind)(x, *learnables, state=[h] * states)
        outputs = all_images(world, y.value).tobytes()
        gradient = tape.backward(y, blocked(world, np.ones((20, 4, 2, 1), "f4")))[h]
        results.append((outputs, all_images(world, gradient).astype("f4").tobytes()))
    assert results[0] == results[1]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", GATES)
def test_truncated_backpropagation(world, kind, reverse):
    """Gradients are the sums of those of chunks that start with the state of the chunk before."""
    units, steps, length = 5, 11, 4
    images, dy = (
        numbers(n, 20, *s, dtype="f8") for n, s in (("x", (2, steps, 1)), ("dy", (5, 11, 1)))
    )
    learnables = [
        numbers(f"{i}", *s, dtype="f8") for i, s in enumerate(shapes(kind, units, 2, 1, 1))
    ]
    function = getattr(dl, kind)

    def gradients_of(rows, state, truncate=None):
        """Return the gradients of the rows of the images, and the state after them."""
        leaves = [dl.Var(v) for v in (blocked(world, images[:, :, rows]), *learnables)]
        y, last = function(*leaves, state=state, reverse=reverse, truncate=truncate)
        cotangents = tape.backward(y, blocked(world, dy[:, :, rows], batch=y.value.batch))
        dx, *of_weights = (cotangents[leaf] for leaf in leaves)
        return [all_images(world, dx), *map(world.gplus, of_weights)], last

    starts = range(0, steps, length)
    chunks = [slice(start, min(start + length, steps)) for start in starts]
    if reverse:
        chunks = [slice(steps - chunk.stop, steps - chunk.start) for chunk in chunks]
    state, parts = None, []
    for chunk in chunks:
        gradients, state = gradients_of(chunk, state)
        parts.append(gradients)
    parts = parts[::-1] if reverse else parts
    expected = [np.concatenate([part[0] for part in parts], axis=2)]
    expected += [sum(part[i] for part in parts) for i in range(1, len(parts[0]))]
    truncated, _ = gradients_of(slice(0, steps), None, truncate=length)
    for value, reference in zip(truncated, expected, strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-10, atol=1e-12)
    complete, _ = gradients_of(slice(0, steps), None)
    assert abs(complete[1] - truncated[1]).max() > 1e-3


@pytest.mark.parametrize("kind", GATES)
def test_the_tape_does_not_keep_the_products_of_the_input(world, kind, monkeypatch):
    """An LSTM keeps 6 numbers per unit and step; the products would be 4 more."""
    x = dl.Var(blocked(world, numbers("x", 20, 2, 9, 3, dtype="f4")))
    weight, *rest = (
        numbers(f"{i}", *s, dtype="f4") for i, s in enumerate(shapes(kind, 6, 2, 3, 1))
    )
    backend, products = backends.of_value(x.value), []
    conv2d = backend.conv2d

    def conv2d_with_reference(*arguments):
        result = conv2d(*arguments)
        products.append(weakref.ref(result))
        return result

    monkeypatch.setattr(backend, "conv2d", conv2d_with_reference)
    values = dl.conv2d(x, weight, None), getattr(dl, kind)(x, weight, *rest)[0]
    of_conv2d, of_steps = products
    assert of_conv2d() is not None and of_steps() is None
    del values
