"""Test networks: tables, initial learnables, specs, and the gradients of the digits network."""

import hashlib
import json
from dataclasses import dataclass

import numpy as np
import pytest
from network_steps import conv_norm_relu, in_float64, model_loss, step
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl.core import keyed
from mpidl.nn import zoo

# SHA-256 of the initial learnables of the digits network with seed 0
DIGITS = "5219cb8aed1ff1392c9c5d80912c7497bfe1b42d69a9bbebdaf90eacc5b2cdf3"


def digest(net):
    return hashlib.sha256(b"".join(v.tobytes() for v in net.parameters.values())).hexdigest()


def test_the_tables_of_the_digits_network():
    net = zoo.digits()
    rows = net.table()
    assert len(rows) == 14 and sum(count for *_, count in rows) == 123_090
    assert rows[0] == ("conv1", "weight", (20, 1, 5, 5), 500)
    assert rows[-2:] == [("dense1", "weight", (10, 11520), 115_200), ("dense1", "bias", (10,), 10)]
    assert [(layer, name) for layer, name, *_ in net.table("state")] == [
        (f"batchnorm{i}", name) for i in (1, 2, 3) for name in ("mean", "variance")
    ]
    assert list(net.parameters) == [f"{layer}.{name}" for layer, name, *_ in rows]
    assert all(v.dtype == np.float32 for v in (*net.parameters.values(), *net.state.values()))
    assert net.output_shape == (10,)
    assert [layer.name for layer in net.layers][3:6] == ["conv2", "batchnorm2", "relu2"]


def test_the_printed_summary():
    lines = str(zoo.digits()).splitlines()
    assert lines[-1] == "123,090 learnables"
    assert lines[1].split() == ["images", "1x28x28"]
    assert lines[2].split() == ["conv1", "Conv2D", "20x24x24", "520"]
    assert lines[-2].split() == ["dense1", "Dense", "10", "115,210"]


def test_initial_learnables_never_change():
    """If the hash changed, training with a seed would no longer give the same weights as before."""
    assert digest(zoo.digits(seed=0)) == DIGITS
    assert digest(zoo.digits(seed=1)) != DIGITS


def test_initial_learnables_depend_on_seed_and_name_alone():
    short = dl.Network([dl.Conv2D(3, 4, name="a"), dl.Dense(2, name="z")], (1, 6, 6), seed=3)
    between = [dl.BatchNorm(), dl.Conv2D(1, 4, name="between")]
    layers = [dl.ReLU(), dl.Conv2D(3, 4, name="a"), *between, dl.Dense(2, name="z")]
    longer = dl.Network(layers, (1, 6, 6), seed=3)
    for name, value in short.parameters.items():
        assert longer.parameters[name].tobytes() == value.tobytes()
    other = dl.Network([dl.Conv2D(3, 4, name="b")], (1, 6, 6), seed=3)
    assert other.parameters["b.weight"].tobytes() != short.parameters["a.weight"].tobytes()


@pytest.mark.parametrize(
    "layer, shape, fan_in, fan_out",
    [
        (dl.Conv2D(5, 20), (1, 28, 28), 25, 500),
        (dl.Conv2D((1, 3), 64, groups=2), (8, 9, 9), 12, 96),
        (dl.Dense(40), (5, 4, 4), 80, 40),
    ],
)
def test_initial_weights_are_glorot_uniform(layer, shape, fan_in, fan_out):
    weight, bias = dl.Network([layer], shape, seed=9).parameters.values()
    bound = np.sqrt(6 / (fan_in + fan_out))
    assert abs(weight).max() <= bound and abs(weight).max() > 0.98 * bound
    assert abs(weight.mean()) < 5 * bound / np.sqrt(3 * weight.size)
    assert weight.var() == pytest.approx(bound**2 / 3, rel=0.15)
    assert not bias.any()


def test_all_ranks_start_with_the_same_learnables(world):
    assert len(set(world.broadcast(world.gather(digest(zoo.digits(seed=5)))))) == 1


def test_a_description_rebuilds_the_network():
    options = {"stride": (2, 1), "padding": ((0, 1), (2, 0)), "dilation": 2, "groups": 2}
    layers = [dl.Conv2D((3, 2), 4, **options), dl.BatchNorm(epsilon=1e-3, decay=0.5)]
    layers += [dl.ReLU(name="bend"), dl.Flatten(), dl.Dense(3)]
    net = dl.Network(layers, (2, 9, 8), seed=6)
    specs = json.loads(json.dumps(net.spec()))
    rebuilt = dl.Network.from_spec(specs, net.input_shape, seed=6)
    assert rebuilt.layers == net.layers and rebuilt.output_shapes == net.output_shapes
    assert digest(rebuilt) == digest(net) and rebuilt.spec() == net.spec()


def test_names_and_shapes_that_do_not_fit_are_refused():
    conv, shape = dl.Conv2D(3, 4), (3, 8, 8)
    cases = [
        (lambda: dl.Network([conv, "relu"], shape), TypeError, "list of layers, got 'relu'"),
        (
            lambda: dl.Network([dl.ReLU(name="a"), dl.ReLU(name="a")], shape),
            ValueError,
            "unique .* 'a'",
        ),
        (lambda: dl.Network([dl.ReLU(name="a.b")], shape), ValueError, "'a.b'"),
        (lambda: dl.Network([conv], (3, 2, 8)), ValueError, "conv1: filters .* leave no output"),
        (lambda: dl.Network([dl.Dense(3), conv], shape), ValueError, "conv1: expected images"),
        (lambda: dl.Network([dl.Conv2D(3, 4, groups=2)], shape), ValueError, "2 groups"),
        (lambda: dl.Network.from_spec([{"type": "Magic"}], shape), ValueError, "'Magic'"),
        (lambda: dl.Network.from_spec([{"name": "x"}], shape), ValueError, "layer type None"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    assert conv.name is None  # the network has named only its copy of the layer


def test_tables_take_only_what_fits(world):
    net = zoo.digits()
    with pytest.raises(ValueError, match="parameters: expected conv1.weight"):
        net.parameters = {"conv1.weight": net.parameters["conv1.weight"]}
    with pytest.raises(ValueError, match="state: expected batchnorm1.mean"):
        net.state = {name: np.zeros(3) for name in net.state}
    with pytest.raises(
        ValueError, match=r"expected images of shape \(1, 28, 28\), got \(1, 8, 8\)"
    ):
        net(blocked(world, np.zeros((20, 1, 8, 8), "f4")))


@dataclass
class Double(dl.Layer):
    """A custom layer that doubles its input."""

    def forward(self, x, context):
        return 2 * x


def test_a_custom_layer(world):
    net = dl.Network([dl.Flatten(), Double()], (2, 3, 3))
    x = numbers("images", 20, 2, 3, 3)
    assert net.layers[1].name == "double1" and net.output_shape == (18,)
    assert np.array_equal(all_images(world, net(blocked(world, x))), 2 * x.reshape(20, 18))
    with pytest.raises(TypeError, match="layer Layer has no forward"):
        dl.Network([dl.Layer()], (2, 3, 3))(blocked(world, x))


def small():
    return dl.Network([*conv_norm_relu(3, 4), dl.Dense(3)], (1, 6, 6), seed=2)


def test_prediction_is_the_same_from_arrays_and_shares(world):
    net = small()
    net.state = {"batchnorm1.mean": numbers("m", 4), "batchnorm1.variance": np.full(4, 0.3, "f4")}
    pixels = (numbers("pixels", 37, 1, 6, 6, low=0) * 256).astype(np.uint8)
    images = pixels / np.float32(255)
    scores = net.predict(pixels)
    assert scores.shape == (37, 3) and scores.dtype == np.float32
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-6)
    assert net.predict(images).tobytes() == scores.tobytes()
    assert all_images(world, net.predict(blocked(world, images))).tobytes() == scores.tobytes()


def test_the_running_state_moves_by_decay(world):
    net, x = small(), numbers("images", 37, 1, 6, 6, dtype=np.float32)
    images, labels = blocked(world, x, np.arange(37) % 3)
    _, _, state = step(world, net, (images, labels))
    convolved = dl.conv2d(images, net.parameters["conv1.weight"], net.parameters["conv1.bias"])
    channels = all_images(world, convolved).astype("f8").transpose(1, 0, 2, 3).reshape(4, -1)
    np.testing.assert_allclose(state["batchnorm1.mean"], 0.1 * channels.mean(axis=1), rtol=1e-5)
    expected = 0.9 + 0.1 * channels.var(axis=1)
    np.testing.assert_allclose(state["batchnorm1.variance"], expected, rtol=1e-6)
    assert all(v.dtype == np.float32 for v in state.values())


# ---- gradients of the digits network ----


def digit_like(count, sample, dtype=np.float32):
    """Return smooth random images in 0..1, and labels. In float64, images have float32 values."""
    noise = keyed.uniform(7, "images", count * 32 * 32, sample=sample).reshape(count, 1, 32, 32)
    blurred = sum(noise[..., i : i + 28, j : j + 28] for i in range(5) for j in range(5)) / 25
    return blurred.astype(np.float32).astype(dtype), np.arange(count) * 7 % 10


def relu_masks(net, images, labels):
    """Return masks of the active ReLU units of this rank, layer by layer, in training mode."""
    masks, x, bound = [], images, net.bind(net.parameters)
    for layer in net.layers:
        x = layer.forward(x, dl.nn.LayerContext(layer, net.parameters, bound.state, True, "global"))
        if isinstance(layer, dl.ReLU):
            masks.append(x.local() > 0)
    return np.concatenate([m.ravel() for m in masks])


@pytest.fixture(scope="module")
def point(world):
    """Return networks and images in float32 and float64 in which the same ReLU units are active.

    For some images, a few of the network's 690,000 ReLU inputs are so close to 0 that rounding to
    float32 changes their sign. The two gradients then belong to different linear pieces of the
    function, and their difference says nothing about rounding. The fixture therefore uses the first
    images without such an input.
    """
    single_net, double_net = zoo.digits(seed=11), in_float64(zoo.digits(seed=11))
    for sample in range(20):
        single = blocked(world, *digit_like(20, sample))
        double = blocked(world, *digit_like(20, sample, np.float64))
        masks = relu_masks(single_net, *single), relu_masks(double_net, *double)
        if world.gop("and", np.array_equal(*masks)):
            return (single_net, single), (double_net, double)
    raise AssertionError("found no images without a ReLU input near 0")


@pytest.fixture(scope="module")
def exact_gradients(world, point):
    return step(world, *point[1])


def test_float32_gradients_of_the_digits_network(world, point, exact_gradients):
    loss, gradients, _ = step(world, *point[0])
    expected_loss, expected, _ = exact_gradients
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    errors = {}
    for name, gradient in gradients.items():
        assert gradient.dtype == np.float32
        # the gradient of a bias before batch normalization is 0 except for rounding, so its error
        # is relative to the gradient of the layer's weights
        scale_name = name.replace(".bias", ".weight") if name.startswith("conv") else name
        scale = np.linalg.norm(expected[scale_name])
        errors[name] = np.linalg.norm(gradient - expected[name]) / scale
    worst = max(errors, key=errors.get)
    print(f"largest relative error of a gradient: {errors[worst]:.2e}, of {worst}")  # pytest -s
    assert errors[worst] <= 1e-5


def test_float64_gradients_of_the_digits_network_along_a_direction(world, point, exact_gradients):
    net, batch = point[1]
    direction = {
        name: numbers(f"direction {name}", *v.shape) * (abs(v).max() + 0.1)
        for name, v in net.parameters.items()
    }

    def loss_at(t):
        moved = {name: v + t * direction[name] for name, v in net.parameters.items()}
        return float(world.gplus(model_loss(net.bind(moved), *batch)))

    epsilon = 1e-7
    slope = (loss_at(epsilon) - loss_at(-epsilon)) / (2 * epsilon)
    _, gradients, _ = exact_gradients
    expected = sum((gradients[name] * direction[name]).sum() for name in gradients)
    assert slope == pytest.approx(expected, rel=1e-6)
