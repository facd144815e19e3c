"""The ops and layers of activations, dropout, cross-channel normalization, transposed convolution,
"same" padding, sums and concatenations: against PyTorch or loops in float64, and their vjps."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from single_rank import SingleRank, all_images, blocked, numbers
from test_ops import conv2d_reference, gradients, share_of

import mpidl as dl
from mpidl.autodiff import tape
from mpidl.blocks import LANES, zero_unused
from mpidl.ops import check


def transposed_reference(x, weight, bias, stride, crops):
    """Each pixel of x times a filter, added to the output; then what is cropped is cut off."""
    (n, _, h, w), (_, k, r, s) = x.shape, weight.shape
    y = np.zeros((n, k, stride[0] * (h - 1) + r, stride[1] * (w - 1) + s))
    for i in range(h):
        for j in range(w):
            at = slice(i * stride[0], i * stride[0] + r), slice(j * stride[1], j * stride[1] + s)
            y[(slice(None), slice(None), *at)] += np.einsum("nc,ckrs->nkrs", x[:, :, i, j], weight)
    (top, bottom), (left, right) = crops
    y = y[:, :, top : y.shape[2] - bottom, left : y.shape[3] - right]
    return y + bias[:, None, None]


def norm_reference(x, before, behind, a, beta, k):
    y = np.empty_like(x)
    for c in range(x.shape[1]):
        some = x[:, max(0, c - before) : c + behind + 1]
        y[:, c] = x[:, c] / (k + a * np.square(some).sum(axis=1)) ** beta
    return y


def same_reference(size, stride, dilation):
    """Convolution of an image padded so that it gives ceil(size / stride) outputs."""

    def convolve(x, w, b):
        pads = []
        for n, taps, step, d in zip(x.shape[2:], w.shape[2:], stride, dilation, strict=True):
            outputs = -(-n // step)
            missing = max(0, (outputs - 1) * step + (taps - 1) * d + 1 - n)
            pads.append((missing // 2, (missing + 1) // 2))
        return conv2d_reference(x, w, b, stride, tuple(pads), dilation, 1)

    return convolve


def transposed(image, weight, stride, cropping, crops):
    return (
        lambda x, w, b: dl.transposed_conv2d(x, w, b, stride=stride, cropping=cropping),
        lambda x, w, b: transposed_reference(x, w, b, check.pair("", "", stride, 1), crops),
        [image],
        [weight, weight[1:2]],
    )


def same(image, weight, stride=1, dilation=1):
    pairs = check.pair("", "", stride, 1), check.pair("", "", dilation, 1)
    return (
        lambda x, w, b: dl.conv2d(x, w, b, padding="same", stride=stride, dilation=dilation),
        same_reference(weight, *pairs),
        [image],
        [weight, weight[:1]],
    )


NONE = ((0, 0), (0, 0))

# name: (op, reference, shapes of one image's values, shapes of replicated values)
CASES = {
    "leaky_relu": (
        lambda x: dl.leaky_relu(x, 0.2),
        lambda x: x * (x > 0) + 0.2 * x * (x < 0),
        [(3, 2, 2)],
        [],
    ),
    "tanh": (
        lambda x: dl.tanh(5 * x),
        lambda x: (np.e ** (10 * x) - 1) / (np.e ** (10 * x) + 1),
        [(3, 4)],
        [],
    ),
    "sigmoid": (lambda x: dl.sigmoid(4 * x), lambda x: 1 / (1 + np.e ** (-4 * x)), [(7,)], []),
    "gelu": (
        lambda x: dl.gelu(4 * x),
        lambda x: 2 * x * np.vectorize(math.erfc)(-2 * np.sqrt(2) * x),
        [(3, 4)],
        [],
    ),
    "gelu, tanh": (
        lambda x: dl.gelu(3 * x, "tanh"),
        lambda x: 1.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (3 * x + 0.044715 * 27 * x**3))),
        [(3, 2, 2)],
        [],
    ),
    "global_average_pool2d": (
        dl.global_average_pool2d,
        lambda x: np.array([[[[c.sum() / c.size]] for c in image] for image in x]),
        [(3, 4, 5)],
        [],
    ),
    "cross_channel_norm": (
        lambda x: dl.cross_channel_norm(3 * x, 5),
        lambda x: norm_reference(3 * x, 2, 2, 1e-4 / 5, 0.75, 2.0),
        [(7, 2, 3)],
        [],
    ),
    "cross_channel_norm, even": (
        lambda x: dl.cross_channel_norm(x, 4, alpha=3.0, beta=0.6, k=0.5),
        lambda x: norm_reference(x, 1, 2, 0.75, 0.6, 0.5),
        [(7, 2, 2)],
        [],
    ),
    "cross_channel_norm, wide": (
        lambda x: dl.cross_channel_norm(x, 20, alpha=10.0, k=1.0),
        lambda x: norm_reference(x, 9, 10, 0.5, 0.75, 1.0),
        [(3,)],
        [],
    ),
    "concat": (dl.concat, lambda *x: np.concatenate(x, axis=1), [(3, 2), (1, 2), (4, 2)], []),
    "concat of features": (
        dl.concat,
        lambda *x: np.array([[*a, *b] for a, b in zip(*x, strict=True)]),
        [(3,), (5,)],
        [],
    ),
    "one value twice": (
        lambda x: dl.concat(x, x) + dl.concat(x, -x),
        lambda x: np.concatenate([2 * x, 0 * x], axis=1),
        [(2, 3, 2)],
        [],
    ),
    "transposed, 2x2/2": transposed((3, 3, 4), (3, 2, 2, 2), 2, 0, NONE),
    "transposed, same": transposed((2, 4, 3), (2, 3, 4, 4), 2, "same", ((1, 1), (1, 1))),
    "transposed, same, odd": transposed((2, 3, 3), (2, 3, 3, 5), 2, "same", ((0, 1), (1, 2))),
    "transposed, gaps": transposed((2, 3, 2), (2, 2, 2, 1), (3, 2), 0, NONE),
    "transposed, cropping": transposed(
        (2, 4, 3), (2, 3, 5, 3), (2, 1), ((3, 1), (0, 2)), ((3, 1), (0, 2))
    ),
    "same": same((2, 4, 5), (3, 2, 3, 3)),
    "same, even filters": same((2, 4, 5), (3, 2, 2, 4)),
    "same, strides": same((2, 7, 6), (3, 2, 3, 4), (2, 3)),
    "same, strides above the filter": same((2, 7, 6), (3, 2, 2, 1), (4, 2)),
    "same, dilation": same((1, 6, 7), (2, 1, 3, 2), (1, 2), (2, 3)),
}
EACH = pytest.mark.parametrize("case", CASES)


def arrays(case, count, dtype=np.float64):
    op, reference, images, replicated = CASES[case]
    made = [numbers(f"{case} {i}", count, *shape, dtype=dtype) for i, shape in enumerate(images)]
    weights = [numbers(f"{case} w{i}", *s, dtype=dtype) for i, s in enumerate(replicated)]
    return op, reference, made, weights


@EACH
@pytest.mark.parametrize("count", [5, 37])
def test_against_the_reference_in_both_types(world, case, count):
    op, reference, images, replicated = arrays(case, count)
    expected = reference(*images, *replicated)
    result, exact = gradients(world, op, share_of(world, images, replicated))
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-13)
    single = [a.astype("f4") for a in images], [w.astype("f4") for w in replicated]
    result, rounded = gradients(world, op, share_of(world, *single))
    for found, wanted in zip([result, *rounded], [expected, *exact], strict=True):
        assert found.shape == wanted.shape and found.dtype == np.float32
        assert abs(found - wanted).max() <= 1e-5 * max(abs(wanted).max(), 1e-2)


@EACH
@pytest.mark.parametrize("count", [5, 37])
def test_vjp_along_random_directions(world, case, count):
    op, _, images, replicated = arrays(case, count)
    dl.check_vjp(op, *share_of(world, images, replicated), seed=count, tolerance=2e-7)


@EACH
def test_last_blocks_of_every_size(world, case):
    for held in range(1, LANES, 1 if "same" not in case else 7):
        op, reference, images, replicated = arrays(case, LANES + held)
        result, _ = gradients(world, op, share_of(world, images, replicated))
        np.testing.assert_allclose(result, reference(*images, *replicated), rtol=1e-11, atol=1e-13)


@EACH
@pytest.mark.parametrize("count", [5, 37])
def test_one_result_on_any_number_of_ranks(world, case, count):
    op, _, images, replicated = arrays(case, count, np.float32)
    expected = gradients(SingleRank(), op, share_of(SingleRank(), images, replicated))
    found = gradients(world, op, share_of(world, images, replicated))
    assert found[0].tobytes() == expected[0].tobytes()
    assert [d.tobytes() for d in found[1]] == [d.tobytes() for d in expected[1]]


@EACH
def test_unused_lanes_do_not_matter(world, case):
    op, _, images, replicated = arrays(case, 21, np.float32)
    clean = share_of(world, images, replicated)
    dirty = []
    for value in clean:
        if isinstance(value, dl.Blocked):
            lanes = value.lanes.copy()
            if value.batch.blocks and value.batch.images[1] == 21:
                lanes[-1, ..., 21 % LANES :] = 1e3
            value = value.like(lanes)
        dirty.append(value)
    expected, found = gradients(world, op, clean), gradients(world, op, dirty)
    assert found[0].tobytes() == expected[0].tobytes()
    assert [d.tobytes() for d in found[1]] == [d.tobytes() for d in expected[1]]


IDLE = SimpleNamespace(rank=1, size=2)


@EACH
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_share_without_blocks(case, dtype):
    op, reference, images, replicated = arrays(case, 5, np.dtype(dtype))
    batch = dl.share(5, IDLE)
    args = [dl.Var(dl.from_images(a[:0], batch)) for a in images]
    weights = [dl.Var(w) for w in replicated]
    y = op(*args, *weights)
    assert y.shape == reference(*images, *replicated).shape
    seed = dl.from_images(np.zeros((0, *y.value.image_shape), dtype), batch)
    found = tape.backward(y, seed, fold=lambda partial: np.zeros(partial.shape))
    for variable in args:
        assert found[variable].lanes.shape == variable.value.lanes.shape
    for variable in weights:
        assert found[variable].shape == variable.shape


# against PyTorch


def torch_functions():
    torch = pytest.importorskip("torch", reason="no PyTorch, which this compares with")
    return torch, torch.nn.functional


@pytest.mark.parametrize("beta", [0.75, 0.5])
@pytest.mark.parametrize("window", [1, 3, 5])
def test_pytorch_normalizes_alike(world, window, beta):
    torch, f = torch_functions()
    x, dy = numbers("x", 20, 7, 3, 2), numbers("dy", 20, 7, 3, 2)
    variable = torch.tensor(x, requires_grad=True)
    expected = f.local_response_norm(variable, window, alpha=0.3, beta=beta, k=1.5)
    expected.backward(torch.tensor(dy))
    value = blocked(world, x)
    leaf = dl.Var(value)
    y = dl.cross_channel_norm(leaf, window, alpha=0.3, beta=beta, k=1.5)
    found = all_images(world, y.value)
    dx = tape.backward(y, blocked(world, dy, batch=value.batch))[leaf]
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(all_images(world, dx), variable.grad.numpy(), rtol=1e-11)


@pytest.mark.parametrize("stride, cropping", [(1, 0), (2, 1), (3, 0), (2, (2, 1))])
def test_pytorch_convolves_back_alike(world, stride, cropping):
    torch, f = torch_functions()
    x, w, b = numbers("x", 20, 3, 4, 5), numbers("w", 3, 2, 5, 3), numbers("b", 2)
    expected = f.conv_transpose2d(*map(torch.tensor, (x, w, b)), stride=stride, padding=cropping)
    y = dl.transposed_conv2d(blocked(world, x), w, b, stride=stride, cropping=cropping)
    np.testing.assert_allclose(all_images(world, y), expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "leaky_relu"])
def test_pytorch_activates_alike(world, name):
    torch, f = torch_functions()
    x = numbers("x", 20, 50, low=-20, high=20)
    expected = getattr(f if name == "leaky_relu" else torch, name)(torch.tensor(x)).numpy()
    found = all_images(world, getattr(dl, name)(blocked(world, x)))
    np.testing.assert_allclose(found, expected, rtol=1e-13)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_pytorch_has_the_same_gelu(world, approximate):
    torch, f = torch_functions()
    x, dy = numbers("x", 20, 50, low=-5, high=5), numbers("dy", 20, 50)
    variable = torch.tensor(x, requires_grad=True)
    expected = f.gelu(variable, approximate=approximate)
    expected.backward(torch.tensor(dy))
    leaf = dl.Var(blocked(world, x))
    y = dl.gelu(leaf, approximate)
    dx = tape.backward(y, blocked(world, dy, batch=leaf.value.batch))[leaf]
    np.testing.assert_allclose(all_images(world, y.value), expected.detach().numpy(), rtol=1e-10)
    np.testing.assert_allclose(all_images(world, dx), variable.grad.numpy(), rtol=1e-9, atol=1e-13)


# dropout


def dropped(world, x, probability=0.5, key="dropout", **batch):
    value = blocked(world, x, batch=dl.share(len(x), world, **batch))
    return all_images(world, dl.dropout(value, probability, key=key))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
def test_dropout_keeps_the_expectation(world, probability, dtype):
    x = np.ones((50, 8, 9, 7), dtype)
    y = dropped(world, x, probability, epoch=2, seed=3)
    kept = y != 0
    threshold = round(probability * 65536)
    assert np.array_equal(np.unique(y[kept]), [np.dtype(dtype).type(65536 / (65536 - threshold))])
    deviation = np.sqrt(max(probability * (1 - probability), 1e-9) / y.size)
    assert abs((~kept).mean() - probability) < 5 * deviation + 1e-5


def test_dropout_is_that_of_the_sample(world):
    """Whatever mini-batch it is in; and another for each epoch, layer, seed."""
    x = numbers("x", 40, 5, 3, 3, dtype=np.float32)
    first = dropped(world, x, epoch=1, seed=1)
    order = np.argsort(numbers("order", 40))
    again = dropped(world, x[order], indices=order, epoch=1, seed=1)
    assert np.array_equal(again, first[order])
    some = dropped(world, x[7:12], indices=np.arange(7, 12), epoch=1, seed=1)
    assert np.array_equal(some, first[7:12])
    for other in (
        dropped(world, x, epoch=2, seed=1),
        dropped(world, x, epoch=1, seed=2),
        dropped(world, x, key="another", epoch=1, seed=1),
        dropped(world, x, indices=np.arange(40) + 40, epoch=1, seed=1),
        dropped(world, x, indices=np.arange(40) + (1 << 32), epoch=1, seed=1),
    ):
        assert 0.4 < ((other != 0) == (first != 0)).mean() < 0.6


@pytest.mark.parametrize("count", [5, 37])
def test_the_gradient_of_dropout(world, count):
    x = numbers("x", count, 3, 5)
    value = blocked(world, x)
    assert dl.check_vjp(lambda v: dl.dropout(v, 0.3), value) < 1e-8
    leaf = dl.Var(value)
    y = dl.dropout(leaf, 0.3)
    found = all_images(world, y.value)
    dx = tape.backward(y, value)[leaf]
    assert np.array_equal(zero_unused(dx.lanes.copy(), dx.batch), dx.lanes)
    assert np.array_equal(all_images(world, dx), found)  # it is linear


@pytest.mark.parametrize("count", [5, 37])
def test_dropout_is_the_same_on_any_number_of_ranks(world, count):
    x = numbers("x", count, 3, 5, dtype=np.float32)
    found, expected = (dropped(w, x, epoch=3) for w in (world, SingleRank()))
    assert found.tobytes() == expected.tobytes()


def test_dropout_of_a_share_without_blocks():
    batch = dl.share(5, IDLE)
    y = dl.dropout(dl.from_images(np.zeros((0, 3, 2), np.float32), batch))
    assert y.shape == (5, 3, 2)


# layers

LAYERS = [
    dl.Conv2D(3, 8, padding="same", name="first"),
    dl.BatchNorm(),
    dl.ReLU(name="a"),
    dl.CrossChannelNorm(5, alpha=1e-2),
    dl.LeakyReLU(0.1),
    dl.GELU(),
    dl.Conv2D((2, 3), 8, padding="same", dilation=2),
    dl.Dropout(0.25, name="drop"),
    dl.Tanh(name="b"),
    dl.Add(inputs=("a", "b"), name="sum"),
    dl.TransposedConv2D(4, 4, 2, "same", name="up"),
    dl.MaxPool2D(2, name="down"),
    dl.Concat(inputs=("sum", "a", "down"), name="both"),
    dl.Sigmoid(),
    dl.GELU("tanh"),
    dl.GlobalAveragePool2D(),
    dl.Dense(3),
    dl.Softmax(),
]


def network():
    return dl.Network(LAYERS, (2, 7, 6), seed=1)


def test_shapes_and_learnables():
    net = network()
    shapes = dict(zip(net.layer_names, net.output_shapes, strict=True))
    assert shapes["first"] == shapes["a"] == shapes["sum"] == (8, 7, 6)
    assert shapes["up"] == (4, 14, 12) and shapes["down"] == (4, 7, 6)
    assert shapes["both"] == (20, 7, 6) and shapes["globalaveragepool1"] == (20, 1, 1)
    assert net.parameters["up.weight"].shape == (8, 4, 4, 4)
    assert net.parameters["dense1.weight"].shape == (3, 20)
    assert net["up"].multiply_adds((8, 7, 6), (4, 14, 12)) == 8 * 7 * 6 * 4 * 16


def results(world, net, images, targets, training=True):
    def loss(n, x):
        return dl.mean_squared_error(n(x), targets)

    if not training:
        return all_images(world, net(images)).tobytes()
    value, gradients, state = dl.value_and_grad(loss)(net, images)
    value, gradients = world.gplus(value), world.gplus(gradients)
    return [np.asarray(v).tobytes() for v in (float(value), *gradients.values(), *state.values())]


def share_of_images(world, dtype=np.float32, **batch):
    x = numbers("images", 37, 2, 7, 6, low=0, high=1, dtype=dtype)
    t = numbers("targets", 37, 3, low=0, high=1, dtype=dtype)
    return blocked(world, x, t, batch=dl.share(37, world, **batch))


def test_a_network_of_them(world):
    """Fused or not, written to a file and read, on any number of ranks: the same bytes."""
    net = network()
    batch = {"epoch": 2, "seed": 5}
    expected = results(SingleRank(), net, *share_of_images(SingleRank(), **batch))
    images, targets = share_of_images(world, **batch)
    assert results(world, net, images, targets) == expected
    single = network()
    single.fuse = False
    assert results(world, single, images, targets) == expected
    again = dl.Network.from_spec(net.spec(), net.input_shape, seed=1)
    assert results(world, again, images, targets) == expected
    other = share_of_images(world, epoch=3, seed=5)
    assert results(world, net, *other) != expected


def test_in_prediction_nothing_is_dropped(world):
    net = network()
    first, second = (share_of_images(world, epoch=epoch) for epoch in (1, 2))
    assert results(world, net, *first, False) == results(world, net, *second, False)
    without = dl.Network(
        [dl.LeakyReLU(1.0, name="drop") if x.name == "drop" else x for x in LAYERS],
        (2, 7, 6),
        seed=1,
    )
    assert results(world, without, *first, False) == results(world, net, *first, False)


def test_gradients_of_a_network_of_them(world):
    """In float64, along one random direction of the images and all learnables."""
    images, targets = share_of_images(world, np.float64)
    net = network()
    net.fuse = False  # the images are differentiated too
    names = list(net.parameters)
    values = [v.astype(np.float64) for v in net.parameters.values()]

    def loss(x, *learnables):
        bound = net.bind(dict(zip(names, learnables, strict=True)))
        return dl.mean_squared_error(bound(x), targets)

    # a pooled maximum or a ReLU that flips would be a corner: a small step
    assert dl.check_vjp(loss, images, *values, step=1e-7, tolerance=1e-5) < 1e-5


def test_softmax_goes_over_the_channels_of_each_pixel(world):
    net = dl.Network([dl.Conv2D(1, 4), dl.Softmax()], (2, 3, 5), seed=1)
    images = blocked(world, numbers("images", 21, 2, 3, 5, dtype=np.float32))
    scores, found = all_images(world, net.logits(images)), all_images(world, net(images))
    exact = np.exp(scores.astype(np.float64))
    np.testing.assert_allclose(found, exact / exact.sum(axis=1, keepdims=True), rtol=1e-6)
    assert all_images(world, net.predict(images)).tobytes() == found.tobytes()


@pytest.mark.parametrize("op", [dl.softmax_cross_entropy, dl.mean_squared_error])
def test_losses_read_an_activation_that_is_not_stored(world, op):
    """A network that ends in convolution, batch normalization and ReLU, run as one op or three."""
    images = blocked(world, numbers("images", 21, 2, 3, 5, dtype=np.float32))
    targets = np.arange(21 * 15).reshape(21, 3, 5) * 7 % 4
    if op is dl.mean_squared_error:
        targets = numbers("targets", 21, 4, 3, 5, dtype=np.float32)
    targets, results = blocked(world, targets, batch=images.batch), []
    for fuse in (True, False):
        net = dl.Network([dl.Conv2D(1, 4), dl.BatchNorm(), dl.ReLU()], (2, 3, 5), seed=1)
        net.fuse = fuse
        value, gradients, _ = dl.value_and_grad(lambda n, x: op(n(x), targets))(net, images)
        results.append([np.asarray(world.gplus(v)).tobytes() for v in (value, *gradients.values())])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "layers, message",
    [
        ([dl.Dropout(1.0)], "dropout1: probability must be at least 0 and below 1, got 1.0"),
        ([], "a network has at least one layer"),
        ([dl.Conv2D(3, 4, groups=0)], "groups must be an integer >= 1, got 0"),
        ([dl.BatchNorm(epsilon=0.0)], "batchnorm1: expected epsilon > 0 and a decay from 0 to 1"),
        ([dl.BatchNorm(decay=3.0)], "batchnorm1: expected epsilon > 0 and a decay from 0 to 1"),
        ([dl.LeakyReLU(-1.0)], "leakyrelu1: scale must be a number >= 0, got -1.0"),
        ([dl.GELU("erf")], "gelu1: approximate must be 'none' or 'tanh', got 'erf'"),
        ([dl.CrossChannelNorm(0)], "crosschannelnorm1: window must be an integer >= 1, got 0"),
        ([dl.CrossChannelNorm(3, k=0)], "crosschannelnorm1: expected alpha >= 0, beta >= 0 and"),
        ([dl.Dense(3), dl.GlobalAveragePool2D()], "globalaveragepool1: expected images"),
        ([dl.Dense(3), dl.TransposedConv2D(3, 2)], "transposedconv1: expected images"),
        ([dl.TransposedConv2D(3, 2, 1, 5)], "transposedconv1: cropping .* leaves nothing"),
        ([dl.TransposedConv2D(2, 2, 3, "same")], "filters at least as large as the stride"),
        ([dl.TransposedConv2D(3, 2, 0)], "stride must be an integer >= 1"),
        ([dl.Conv2D(3, 2, padding="equal")], "padding must be"),
        (
            [dl.ReLU(name="a"), dl.Conv2D(3, 2, name="b"), dl.Add(inputs=("a", "b"))],
            "add1: expected two or more inputs of one shape",
        ),
        (
            [dl.ReLU(name="a"), dl.Conv2D(3, 2, name="b"), dl.Concat(inputs=("a", "b"))],
            "concat1: expected two or more inputs that differ in their channels alone",
        ),
    ],
)
def test_layers_that_cannot_be(layers, message):
    with pytest.raises(ValueError, match=message):
        dl.Network(layers, (2, 7, 6))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: dl.leaky_relu(x, -0.1), "scale must be a number >= 0, got -0.1"),
        (lambda x: dl.gelu(x, True), "gelu: approximate must be 'none' or 'tanh', got True"),
        (lambda x: dl.cross_channel_norm(x, 0), "window must be an integer >= 1, got 0"),
        (lambda x: dl.cross_channel_norm(x, 5, k=0), "k > 0"),
        (lambda x: dl.dropout(x, 1.5), "dropout: probability must be"),
        (lambda x: dl.concat(x, dl.flatten(x)), "concat: expected values of one type"),
        (
            lambda x: dl.transposed_conv2d(x, np.ones((3, 2, 2, 2)), np.ones(2)),
            r"expected weight \(2, K, R, S\), got weight \(3, 2, 2, 2\)",
        ),
        (
            lambda x: dl.transposed_conv2d(x, np.ones((2, 3, 2, 2)), np.ones(2)),
            r"expected bias \(3,\), got \(2,\)",
        ),
        (
            lambda x: dl.transposed_conv2d(x, np.ones((2, 3, 2, 2)), np.ones(3), cropping="all"),
            "cropping must be",
        ),
    ],
)
def test_errors_say_what_was_expected(world, call, message):
    with pytest.raises(ValueError, match=message):
        call(blocked(world, np.zeros((20, 2, 3, 3))))


def test_values_of_different_mini_batches_are_not_joined(world):
    a, b = (blocked(world, np.zeros((20, 2, 3))) for _ in range(2))
    with pytest.raises(ValueError, match="belong to different mini-batches"):
        dl.concat(a, b)
    with pytest.raises(TypeError, match="expected a value per image"):
        dl.concat(a, np.zeros((20, 2, 3)))
