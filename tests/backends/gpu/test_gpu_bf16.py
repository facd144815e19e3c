"""Test bfloat16 on the emulated GPU: where numbers are rounded, and whole networks.

The numbers of the tests of rounding are such that float32 sums are exact, so the order of sums
does not matter, and a result is the exact number, rounded once.
"""

import ml_dtypes
import numpy as np
import pytest
from image_sets import ReadArrays
from network_steps import in_float64
from single_rank import SingleRank, numbers

import mpidl as dl
from mpidl.backends import REFERENCE as reference
from mpidl.backends import settings
from mpidl.backends.deferred import NormalizedInput
from mpidl.backends.gpu import array
from mpidl.backends.gpu.backend import GPU
from mpidl.backends.reference import bf16
from mpidl.backends.shapes import Geometry, Windows
from mpidl.core.blocks import LANES
from mpidl.core.fold import Tree
from mpidl.core.tape import value_of
from mpidl.core.values import BF16
from mpidl.errors import UserError
from mpidl.training.files import checkpoint
from mpidl.training.files.model_file import weights_sha256

TREE = Tree(1, ((0, 1),), 0)
PADDED = Geometry((1, 1), ((1, 1), (1, 1)))
ARCHITECTURES = ["sm_90", "sm_75"]  # with and without tensor cores for bfloat16
on_both = pytest.mark.parametrize("device", ARCHITECTURES, indirect=True)


@pytest.fixture(autouse=True)
def _bf16(monkeypatch):
    monkeypatch.setattr(settings, "precision", "bf16")
    monkeypatch.setattr(settings, "direct", False)


@pytest.fixture(params=[ARCHITECTURES[0], pytest.param("sm_75", marks=pytest.mark.slow("gpu"))])
def device(request, emulated):
    with emulated(architecture=request.param) as device:
        yield device


def rounded(x):
    """Round to the nearest bfloat16 number, ties to even."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def integers(name, *shape, limit=40):
    return np.round(numbers(f"bf16 {name}", *shape, low=-limit, high=limit))


def stored(x):
    """Return bfloat16 numbers as lanes on the device."""
    assert np.array_equal(rounded(x), x)
    return array.lanes(bf16.narrowed(x.astype(np.float32)))


def plain(x):
    return array.plain(x.astype(np.float32))


def filters(x):
    return array.filters(x.astype(np.float32))


class Numbers:
    """Arguments of ops on a block of images. `norm` has factors with exact products."""

    def __init__(self):
        self.x, self.other = (integers(n, 1, 4, 5, 5, LANES, limit=250) for n in ("x", "other"))
        self.dy = integers("dy", 1, 8, 5, 5, LANES)
        self.weight, self.bias = integers("weight", 8, 4, 3, 3, limit=9), integers("bias", 8)
        self.of_dense, self.of_scores = integers("dense", 3, 100, limit=9), integers("b", 3)
        self.mean, self.scale, self.beta = (
            np.array(v) for v in ([3, -30, 8, 1], [1.5, 3, 0.75, -2.5], [0.25, -1, 7, 0.5])
        )
        self.norm = (self.x - by_channel(self.mean)) * by_channel(self.scale)
        self.norm += by_channel(self.beta)

    def deferred(self, kind):
        return kind(stored(self.x), *map(plain, (self.mean, self.scale, self.beta)))

    def convolved(self, x):
        return reference.conv2d(x, self.weight, self.bias, PADDED)


def by_channel(vector):
    return vector[:, None, None, None]


# Each function returns the result of an op, the exact number before it is rounded, and numbers that
# an op would return that rounds an intermediate value as well, or that does not round an operand.


def convolution(n):
    y = GPU.conv2d(stored(n.x), filters(n.weight), plain(n.bias), PADDED)
    exact, bias = n.convolved(n.x), by_channel(n.bias)
    return y, exact, rounded(exact - bias) + bias


def convolution_of_an_activation(n):
    y = GPU.conv2d(n.deferred(GPU.source), filters(n.weight), plain(n.bias), PADDED)
    x = np.maximum(n.norm, 0)
    return y, n.convolved(rounded(x)), n.convolved(x)


def gradient_of_images(n):
    needs = True, False, False
    arguments = stored(n.dy), stored(n.x), filters(n.weight), PADDED, plain_counts(), TREE, needs
    dx = GPU.conv2d_backward(*arguments)[0]
    weights = np.split(n.weight, 2)  # of half of the filters: partial sums that are rounded
    parts = [
        reference.conv2d_backward(dy, n.x, w, PADDED, np.full(1, LANES), TREE, needs)[0]
        for dy, w in zip(np.split(n.dy, 2, axis=1), weights, strict=True)
    ]
    return dx, sum(parts), rounded(parts[0]) + rounded(parts[1])


def plain_counts():
    return array.plain(np.full(1, LANES, np.int32))


def normalization(n):
    y = GPU.batchnorm(stored(n.x), *map(plain, (n.mean, n.scale, n.beta)))
    return y, n.norm, rounded(n.norm - by_channel(n.beta)) + by_channel(n.beta)


def addition(n):
    y = GPU.add(n.deferred(NormalizedInput), stored(n.other))
    return y, n.norm + n.other, rounded(n.norm) + n.other


def addition_and_relu(n):
    y = GPU.add_relu(n.deferred(NormalizedInput), stored(n.other))
    exact, twice = n.norm + n.other, rounded(n.norm) + n.other
    return y, np.maximum(exact, 0), np.maximum(twice, 0)


def gradient_of_a_normalization(n):
    vectors = n.mean, n.scale, n.beta, n.mean
    dx = GPU.batchnorm_dx(stored(n.other), stored(n.x), *map(plain, vectors), plain_counts())
    mean, a, b, c = map(by_channel, vectors)
    rest = b * (n.x - mean) + c
    return dx, a * n.other + rest, a * n.other + rounded(rest)


def mean_of_windows(n):
    y = GPU.average_pool2d(stored(n.x), Windows((2, 2), (1, 1), ((0, 0), (0, 0))), True)
    a, b, c, d = (n.x[:, :, i : i + 4, j : j + 4] for i in (0, 1) for j in (0, 1))
    return y, (a + b + c + d) / 4, (rounded(a + b) + rounded(c + d)) / 4


def gradient_of_features(n):
    dy = n.dy.reshape(1, -1, LANES)[:, :3]
    weight = array.filters(n.of_dense.astype(np.float32), (4, 5, 5))
    dx = GPU.dense_backward(plain_lanes(dy), stored(n.x), weight, TREE, (True, False, False))[0]
    products = dy[0][:, None] * n.of_dense[:, :, None]
    rest = products[1] + products[2]
    return dx, (products[0] + rest)[None], (products[0] + rounded(rest))[None]


def plain_lanes(x):
    return array.lanes(x.astype(np.float32))


OPS = [convolution, convolution_of_an_activation, gradient_of_images, normalization, addition]
OPS += [addition_and_relu, gradient_of_a_normalization, mean_of_windows, gradient_of_features]


@on_both
@pytest.mark.parametrize("op", OPS)
def test_an_op_rounds_its_result_once(device, op):
    """A result that is not rounded, or rounded twice, would differ."""
    result, exact, other = op(Numbers())
    nearest = rounded(exact)
    assert result.dtype == BF16 and np.array_equal(bf16.widened(result.numpy()), nearest)
    assert not np.array_equal(nearest, exact) and not np.array_equal(nearest, rounded(other))


@on_both
def test_scores_of_a_dense_layer_are_not_rounded(device):
    n = Numbers()
    weight = array.filters(n.of_dense.astype(np.float32), (4, 5, 5))
    x = stored(n.x).reshape(1, 100, LANES)
    exact = np.einsum("kf,bfl->bkl", n.of_dense, n.x.reshape(1, 100, LANES))
    exact += n.of_scores[:, None]
    y = GPU.dense(x, weight, plain(n.of_scores))
    assert y.dtype == np.float32 and np.array_equal(y.numpy(), exact)
    assert not np.array_equal(rounded(exact), exact)


@on_both
def test_statistics_are_those_of_the_stored_numbers(device):
    n = Numbers()
    arguments = filters(n.weight), plain(n.bias), PADDED, plain_counts(), TREE
    y, partial = GPU.conv2d_moments(stored(n.x), *arguments)
    exact = n.convolved(n.x)
    assert np.array_equal(bf16.widened(y.numpy()), rounded(exact))
    (node,) = partial.terms[0].nodes
    _, means, _ = np.split(node.numpy(), [1, 9])
    np.testing.assert_allclose(means, rounded(exact).mean(axis=(0, 2, 3, 4)), rtol=1e-12)
    assert abs(means / exact.mean(axis=(0, 2, 3, 4)) - 1).max() > 1e-6


def test_weights_are_rounded_copies_for_tensor_cores(emulated):
    """Kernels without tensor cores, as on GPUs before sm_80, read the weights in float32."""
    n = Numbers()
    weight = n.weight + integers("rest", *n.weight.shape, limit=3) / 256
    results = {}
    for architecture in ARCHITECTURES:
        with emulated(architecture=architecture):
            y = GPU.conv2d(stored(n.x), filters(weight), None, PADDED)
            results[architecture] = bf16.widened(y.numpy())
    for architecture, read in zip(ARCHITECTURES, (rounded(weight), weight), strict=True):
        expected = rounded(reference.conv2d(n.x, read, None, PADDED))
        assert np.array_equal(results[architecture], expected)
    assert not np.array_equal(*results.values())


# networks

SIDE, CLASSES, COUNT = 8, 3, 37


def residual():
    return [
        *(dl.Conv2D(3, 8, padding=1, bias=False), dl.BatchNorm(), dl.ReLU(name="stem")),
        *(dl.Conv2D(3, 8, padding=1, bias=False), dl.BatchNorm(), dl.ReLU()),
        *(dl.Conv2D(1, 8, bias=False), dl.BatchNorm(name="branch")),
        *(dl.Add(inputs=("branch", "stem")), dl.ReLU()),
        *(dl.Conv2D(3, 12, stride=2, padding=1, bias=False), dl.BatchNorm(), dl.ReLU()),
        *(dl.GlobalAveragePool2D(), dl.Dense(CLASSES)),
    ]


def depthwise():
    return [
        *(dl.Conv2D(3, 8, stride=2, padding=1, bias=False), dl.BatchNorm(), dl.Clip(0, 6)),
        *(dl.Conv2D(3, 8, padding=1, groups=8, bias=False), dl.BatchNorm(), dl.Clip(0, 6)),
        *(dl.Conv2D(1, 6, bias=False), dl.BatchNorm(), dl.Dense(CLASSES)),
    ]


def joined():
    return [
        *(dl.Conv2D(3, 8, padding=1), dl.ReLU(), dl.CrossChannelNorm(5)),
        *(dl.MaxPool2D(2, name="pool"), dl.TransposedConv2D(2, 4, stride=2), dl.ReLU()),
        *(dl.MaxPool2D(3, stride=2, padding=1, name="up"), dl.Concat(inputs=("pool", "up"))),
        *(
            dl.GlobalAveragePool2D(),
            dl.Sigmoid(name="gate"),
            dl.Multiply(inputs=("concat1", "gate")),
        ),
        *(dl.Scale(0.5), dl.StochasticDepth(0.1)),
        *(dl.AveragePool2D(2), dl.Dense(20), dl.ReLU(), dl.Dropout(0.25), dl.Dense(CLASSES)),
    ]


NETWORKS = {"residual": residual, "depthwise": depthwise, "joined": joined}


def network(name):
    return dl.Network(NETWORKS[name](), (2, SIDE, SIDE), seed=1)


def pictures(targets=None):
    images = numbers("bf16 pictures", COUNT, 2, SIDE, SIDE, low=0, high=200).astype(np.uint8)
    labels = np.arange(COUNT) * 7 % CLASSES
    images[np.arange(COUNT), 0, labels * 2, :] = 255
    return dl.ArrayDatastore(images, labels) if targets is None else ReadArrays(images, targets)


def cross_entropy(net, images, labels):
    return dl.softmax_cross_entropy(net(images), labels)


def gradients(world, net, loss=cross_entropy, store=None, double=False):
    """Return the loss and the gradients of the first mini-batch, as float64 arrays."""
    store, ranks = pictures() if store is None else store, SingleRank()
    queue = dl.MinibatchQueue(store, COUNT, world=world, shuffle="never")
    ((images, labels),) = queue.epoch(1)
    if double:
        images = images.like(images.lanes.astype(np.float64))
    ranks = world if getattr(world, "device", None) is not None else ranks
    net.to(getattr(world, "device", None))
    try:
        value, table, *_ = dl.value_and_grad(loss)(net, images, labels)
        table = {name: np.asarray(g, np.float64) for name, g in ranks.gplus(table).items()}
        return float(np.asarray(ranks.gplus(value))), table
    finally:
        net.to(None)


def distance(table, exact):
    """Return the error of all gradients as one vector."""
    a, b = (np.concatenate([t[name].ravel() for name in exact]) for t in (table, exact))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_have_the_error_of_the_cpu(world, name):
    """The error relative to float64 is that of the CPU's separate layers and direct sums."""
    net, host = network(name), dl.World(threads=1)
    loss, table = gradients(world, net)
    net.fuse, settings.winograd = False, "off"
    cpu_loss, cpu_table = gradients(host, net)
    settings.precision = "fp32"
    exact_loss, exact = gradients(host, in_float64(net), double=True)
    errors = distance(table, exact), distance(cpu_table, exact)
    print(f"{name}: {errors[0]:.4f} on the GPU, {errors[1]:.4f} on the CPU")
    assert 1e-4 < errors[0] < 1.3 * errors[1] < 0.15
    assert loss == pytest.approx(exact_loss, abs=5e-3) and loss != exact_loss
    assert cpu_loss == pytest.approx(loss, abs=5e-3)


def of_targets(loss, *shape, labels=False, **options):
    """Return (function of a network and a mini-batch, targets of its images)."""
    targets = numbers(f"bf16 targets {shape}", COUNT, *shape, low=0, high=CLASSES)
    targets = targets.astype(np.int32 if labels else np.float32)
    return lambda net, images, expected: loss(net(images), expected, **options), targets


def scores_of_pixels():
    return [*NETWORKS["depthwise"]()[:-1], dl.Conv2D(1, CLASSES)]


PIXELS, IMAGES = (SIDE // 2, SIDE // 2), (CLASSES, SIDE // 2, SIDE // 2)
LOSSES = {
    "mse": of_targets(dl.mean_squared_error, *IMAGES),
    "mae": of_targets(dl.mean_absolute_error, *IMAGES),
    "crossentropy": of_targets(dl.softmax_cross_entropy, *PIXELS, labels=True),
    "focal": of_targets(dl.softmax_cross_entropy, *PIXELS, labels=True, focal_gamma=2.0),
    "dice": of_targets(dl.dice_loss, *PIXELS, labels=True),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_images_read_the_stored_numbers(world, name):
    """The outputs of a convolution are bfloat16; the loss of these numbers is not rounded."""
    net = dl.Network(scores_of_pixels(), (2, SIDE, SIDE), seed=1)
    loss, targets = LOSSES[name]
    store, outputs = pictures(targets), []

    def observed(net, images, expected):
        y = net(images)
        outputs.append(value_of(y))
        return loss(lambda _: y, images, expected)

    value, table = gradients(world, net, observed, store)
    y = bf16.widened(outputs[0].raw.numpy()).astype(np.float64)
    host = dl.World(threads=1)
    ((images, expected),) = dl.MinibatchQueue(store, COUNT, world=host, shuffle="never").epoch(1)
    exact = loss(lambda _: images.like(y), images, expected)
    assert outputs[0].storage == BF16 and outputs[0].dtype == np.float32
    assert value == pytest.approx(float(SingleRank().gplus(exact)), rel=1e-6)
    net.fuse, settings.winograd = False, "off"
    assert distance(table, gradients(host, net, loss, store)[1]) < 0.1


LAST = {
    "float32 images": [dl.Conv2D(1, 2, name="c"), dl.Add(inputs=("c", "first"))],
    "scores and images": [dl.Conv2D(1, 3, name="c"), dl.Concat(inputs=("c", "first"))],
    "normalization": [dl.Conv2D(1, 3), dl.BatchNorm()],
    "depthwise": [dl.Conv2D(3, 2, groups=2)],
    "transposed": [dl.TransposedConv2D(2, 3, stride=2)],
    "normalized scores": [dl.Dense(4), dl.BatchNorm(), dl.ReLU(), dl.Dense(3)],
}


@pytest.mark.parametrize("name", LAST)
def test_cotangents_have_the_types_of_their_values(world, name):
    """A step of layers with float32 and bfloat16 outputs runs on any GPU, recorded and eager."""
    layers = [
        dl.MaxPool2D(2, name="first"),
        dl.Conv2D(1, 2),
        dl.BatchNorm(),
        dl.ReLU(),
        *LAST[name],
    ]
    hashes = set()
    for graphs in ("auto", "off"):
        net = dl.Network(layers, (2, SIDE, SIDE), seed=1)
        store = pictures(numbers(f"bf16 {name}", COUNT, *net.output_shape, dtype=np.float32))
        before = net.parameters
        options = {"loss": "mse", "epochs": 1, "batch_size": 20, "graphs": graphs}
        train(world, net, store, **options)
        assert all(np.isfinite(v).all() for v in net.parameters.values())
        assert any((net.parameters[name] != before[name]).any() for name in before)
        hashes.add(weights_sha256(net))
    assert len(hashes) == 1


def train(world, net, store=None, out=None, resume=None, **options):
    options = {"epochs": 3, "batch_size": 20, "learning_rate": 0.05, "verbose_every": 0} | options
    options = dl.TrainingOptions(**{"precision": "bf16"} | options)
    store = pictures() if store is None else store
    return dl.train(net, store, options, world=world, out=out, resume=resume)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_training_is_near_that_in_float32(world, name):
    """Recorded and launched steps have the same bytes, and a mean loss near that in float32."""
    nets = {key: network(name) for key in ("auto", "off", "fp32")}
    for graphs in ("auto", "off"):
        train(world, nets[graphs], graphs=graphs)
    assert weights_sha256(nets["auto"]) == weights_sha256(nets["off"])
    train(world, nets["fp32"], precision="fp32")
    settings.precision = "fp32"
    losses = [dl.evaluate(net, pictures(), world=world).loss for net in nets.values()]
    assert losses[0] == pytest.approx(losses[2], abs=0.01) and losses[0] != losses[2]
    start = network(name).parameters
    changes = ({k: v - start[k] for k, v in nets[n].parameters.items()} for n in ("auto", "fp32"))
    assert 1e-4 < distance(*changes) < 0.2


def test_recorded_and_launched_steps_of_adam(world):
    """Clipping and averages do not read rounded numbers that only one of the two rounds."""
    options = {"solver": "adam", "gradient_threshold": 0.3, "average": "ema"}
    options |= {"gradient_threshold_method": "global-l2norm", "learning_rate": 0.01}
    hashes = set()
    for graphs in ("auto", "off"):
        net = network("joined")
        train(world, net, graphs=graphs, **options)
        hashes.add(weights_sha256(net))
    assert len(hashes) == 1


def test_a_run_resumes_and_its_model_is_saved(world, tmp_path):
    nets = [network("residual") for _ in range(3)]
    train(world, nets[0])
    train(world, nets[1], out=str(tmp_path), max_iterations=3)
    train(world, nets[2], resume=checkpoint.load(str(tmp_path)))
    assert weights_sha256(nets[2]) == weights_sha256(nets[0]) != weights_sha256(nets[1])
    path = str(tmp_path / "model.h5")
    dl.save_model(path, nets[2])
    loaded = dl.load_model(path)[0]
    assert loaded.trained_precision == "bf16"
    assert weights_sha256(loaded) == weights_sha256(nets[0])


def test_scores_and_evaluations(world):
    """Scores are float32 numbers, and near those that the CPU computes in float32."""
    net, store, host = network("residual"), pictures(), dl.World(threads=1)
    train(world, net)
    results = []
    for ranks, precision in ((world, "bf16"), (host, "fp32")):
        settings.precision = precision
        results.append(
            (
                dl.predict(net, store, world=ranks, batch_size=20),
                dl.activations(net, store, "relu2", world=ranks),
                dl.evaluate(net, store, world=ranks, batch_size=20).loss,
            )
        )
    for value, expected in zip(*results, strict=True):
        value, expected = np.asarray(value), np.asarray(expected)
        assert value.dtype == expected.dtype and not np.array_equal(value, expected)
        assert abs(value - expected).max() < 0.02 * abs(expected).max()


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_the_precision_of_a_custom_loop(monkeypatch, precision):
    monkeypatch.setattr(settings, "on_gpu", True)
    dl.configure(precision=precision)
    assert settings.precision == precision
    monkeypatch.setattr(settings, "on_gpu", False)
    if precision == "tf32":
        with pytest.raises(UserError, match="^--precision tf32: expected fp32 or bf16 on CPUs;"):
            dl.configure(precision=precision)
