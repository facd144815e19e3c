"""Test all layers in one network, softmax, dropout and losses, and errors for wrong arguments."""

import re

import numpy as np
import pytest
from network_steps import conv_norm_relu, fused_and_separate, in_float64, step_bytes
from single_rank import SingleRank, all_images, blocked, numbers

import mpidl as dl

LAYERS = [
    dl.Conv2D(3, 8, padding="same", name="first"),
    dl.BatchNorm(),
    dl.ReLU(name="a"),
    dl.CrossChannelNorm(5, alpha=1e-2),
    dl.GroupNorm(4),
    dl.LeakyReLU(0.1),
    dl.InstanceNorm(),
    dl.PReLU(),
    dl.GELU(),
    dl.HardSwish(),
    dl.Pad2D(((0, 1), (1, 0)), 0.25),
    dl.AveragePool2D(2, 1, ((0, 0), (0, 0)), count_padding=False),
    dl.ChannelShuffle(4),
    dl.ChannelSlice(1, 7),
    dl.Resize2D(scale=1.5, mode="bilinear"),
    dl.Resize2D((8, 10)),
    dl.AdaptiveAveragePool2D((7, 6)),
    dl.Conv2D((2, 3), 8, padding="same", dilation=2),
    dl.Dropout(0.25, name="drop"),
    dl.Tanh(name="b"),
    dl.Add(inputs=("a", "b"), name="sum"),
    dl.TransposedConv2D(4, 4, stride=2, cropping="same", name="up"),
    dl.MaxPool2D(2, name="down"),
    dl.Concat(inputs=("sum", "a", "down"), name="both"),
    dl.GlobalAveragePool2D(name="means"),
    dl.HardSigmoid(name="gate"),
    dl.Multiply(inputs=("both", "gate"), name="gated"),
    dl.Scale(0.5),
    dl.StochasticDepth(0.25, name="depth"),
    dl.Add(inputs=("gated", "depth")),
    dl.Sigmoid(),
    dl.LayerNorm(),
    dl.GELU("tanh"),
    dl.Swish(),
    dl.LayerNorm("image"),
    dl.HardSigmoid(),
    dl.LSTM(5),
    dl.GRU(6, reverse=True),
    dl.GlobalAveragePool2D(),
    dl.PReLU(shared=True),
    dl.Clip(-0.1, 6),
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
    assert shapes["both"] == (20, 7, 6) and shapes["globalaveragepool2"] == (6, 1, 1)
    assert net.parameters["up.weight"].shape == (8, 4, 4, 4)
    assert net.parameters["dense1.weight"].shape == (3, 6)
    assert net.parameters["layernorm1.gamma"].shape == (20,)
    assert net.parameters["layernorm2.beta"].shape == (20, 7, 6)
    assert net["up"].multiply_adds((8, 7, 6), (4, 14, 12)) == 8 * 7 * 6 * 4 * 16


def test_arguments_may_be_numbers_of_numpy(tmp_path):
    """Layers convert NumPy numbers to Python numbers, so files and messages are the same."""
    two, half = np.int64(2), np.float32(0.5)
    layers = [
        dl.Conv2D((two, 3), np.int16(8), stride=[two, 1], padding=np.uint8(1), groups=two),
        dl.BatchNorm(epsilon=half),
        dl.LeakyReLU(half),
        dl.Clip(-half, np.float64(6)),
        dl.Pad2D(((0, two), (1, 0)), half),
        dl.CrossChannelNorm(two, alpha=half),
        dl.MaxPool2D(two),
        dl.Dropout(half),
        dl.Dense(two),
    ]
    plain = [
        dl.Conv2D((2, 3), 8, stride=[2, 1], padding=1, groups=2),
        dl.BatchNorm(epsilon=0.5),
        dl.LeakyReLU(0.5),
        dl.Clip(-0.5, 6.0),
        dl.Pad2D(((0, 2), (1, 0)), 0.5),
        dl.CrossChannelNorm(2, alpha=0.5),
        dl.MaxPool2D(2),
        dl.Dropout(0.5),
        dl.Dense(2),
    ]
    assert repr(layers) == repr(plain)
    files = []
    for name, arguments in (("numpy", layers), ("plain", plain)):
        dl.save_model(tmp_path / name, dl.Network(arguments, (2, 7, 6), seed=1))
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]


def squared_error(net, images, targets):
    return dl.mean_squared_error(net(images), targets)


def mini_batch(world, dtype=np.float32, **batch):
    images = numbers("images", 37, 2, 7, 6, low=0, high=1, dtype=dtype)
    targets = numbers("targets", 37, 3, low=0, high=1, dtype=dtype)
    return blocked(world, images, targets, batch=dl.share(37, world, **batch))


def test_layers_without_bias_compute_what_a_fixed_bias_of_0_does(world):
    def make(**options):
        layers = [
            *(dl.Conv2D(3, 6, padding=1, **options), dl.BatchNorm(), dl.ReLU()),
            *(dl.Conv2D(3, 4, stride=2, **options), dl.BatchNorm(), dl.Tanh()),
            *(dl.TransposedConv2D(2, 3, stride=2, **options), dl.Dense(3, **options)),
        ]
        return dl.Network(layers, (2, 7, 6), seed=1)

    bare, fixed = make(bias=False), make(bias_learn_rate_factor=0.0)
    assert [name for name in bare.parameters if name.endswith(".bias")] == []
    assert fixed.trainable.keys() == bare.parameters.keys()
    images, targets = mini_batch(world)
    outputs = [net(images).local().tobytes() for net in (bare, fixed)]
    assert outputs[0] == outputs[1]
    results = [
        dl.value_and_grad(squared_error, reduce=world)(net, images, targets)[:2]
        for net in (bare, fixed)
    ]
    (loss, gradients), (expected_loss, expected) = results
    assert loss == expected_loss and gradients.keys() == expected.keys()
    assert all(gradients[name].tobytes() == expected[name].tobytes() for name in gradients)
    restored = dl.Network.from_spec(bare.spec(), bare.input_shape, seed=1)
    assert restored.spec() == bare.spec() and list(restored.parameters) == list(bare.parameters)
    assert "bias" not in fixed.spec()[0]  # files of networks with biases do not change


def test_a_network_of_them_gives_the_same_bytes(world):
    """Outputs have the same bytes on any number of ranks, fused or not, and from a model file."""
    batch = {"epoch": 2, "seed": 5}
    arguments = network(), mini_batch(SingleRank(), **batch), squared_error
    expected = step_bytes(SingleRank(), *arguments)
    fused, separate = fused_and_separate(network)
    rebuilt = dl.Network.from_spec(fused.spec(), fused.input_shape, seed=1)
    for net in (fused, separate, rebuilt):
        assert step_bytes(world, net, mini_batch(world, **batch), squared_error) == expected
    other_epoch = mini_batch(world, epoch=3, seed=5)
    assert step_bytes(world, fused, other_epoch, squared_error) != expected


def test_prediction_drops_nothing(world):
    first, second = (mini_batch(world, epoch=epoch)[0] for epoch in (1, 2))
    dropping = dl.Dropout, dl.StochasticDepth
    layers = [dl.LeakyReLU(1.0, name=x.name) if isinstance(x, dropping) else x for x in LAYERS]
    identity = dl.Network(layers, (2, 7, 6), seed=1)
    scores = all_images(world, network()(first)).tobytes()
    assert all_images(world, network()(second)).tobytes() == scores
    assert all_images(world, identity(first)).tobytes() == scores


def test_gradients_of_a_network_of_them(world):
    """Check the gradients in float64, along one random direction of images and learnables."""
    images, targets = mini_batch(world, np.float64)
    net = in_float64(network())
    net.fuse = False  # check_vjp also differentiates the images

    def loss(x, *learnables):
        bound = net.bind(dict(zip(net.parameters, learnables, strict=True)))
        return dl.mean_squared_error(bound(x), targets)

    # the step is small, so that no ReLU flips and no maximum moves
    args = images, *net.parameters.values()
    assert dl.check_vjp(loss, *args, step=1e-7, tolerance=1e-5) < 1e-5


def test_softmax_goes_over_the_channels_of_each_pixel(world):
    net = dl.Network([dl.Conv2D(1, 4), dl.Softmax()], (2, 3, 5), seed=1)
    images = blocked(world, numbers("images", 21, 2, 3, 5, dtype=np.float32))
    scores, shares = all_images(world, net.logits(images)), all_images(world, net(images))
    exact = np.exp(scores.astype(np.float64))
    np.testing.assert_allclose(shares, exact / exact.sum(axis=1, keepdims=True), rtol=1e-6)
    assert all_images(world, net.predict(images)).tobytes() == shares.tobytes()


@pytest.mark.parametrize("op", [dl.softmax_cross_entropy, dl.mean_squared_error])
def test_losses_read_an_activation_that_is_not_stored(world, op):
    """The network ends with convolution, batch normalization and ReLU, as one op or three ops."""
    images = blocked(world, numbers("images", 21, 2, 3, 5, dtype=np.float32))
    targets = np.arange(21 * 15).reshape(21, 3, 5) * 7 % 4
    if op is dl.mean_squared_error:
        targets = numbers("targets", 21, 4, 3, 5, dtype=np.float32)
    batch = images, blocked(world, targets, batch=images.batch)
    layers = conv_norm_relu(1, 4)
    fused, separate = (
        step_bytes(world, net, batch, lambda n, x, t: op(n(x), t))
        for net in fused_and_separate(lambda: dl.Network(layers, (2, 3, 5), seed=1))
    )
    assert fused == separate


@pytest.mark.parametrize(
    "layers, message",
    [
        ([dl.Dropout(1.0)], "dropout1: probability must be at least 0 and below 1, got 1.0"),
        (
            [dl.StochasticDepth(-0.1)],
            "stochasticdepth1: probability must be at least 0 and below 1",
        ),
        ([dl.Scale(float("inf"))], "scale1: initial must be a finite number, got inf"),
        (
            [dl.ReLU(name="a"), dl.Conv2D(3, 4, name="b"), dl.Multiply(inputs=("a", "b"))],
            "multiply1: expected two inputs, of equal shapes or with axes of size 1, got",
        ),
        ([], "expected at least one layer"),
        ([dl.Conv2D(3, 4, groups=0)], "groups must be an integer >= 1, got 0"),
        ([dl.BatchNorm(epsilon=0.0)], "batchnorm1: expected epsilon > 0 and a decay from 0 to 1"),
        ([dl.BatchNorm(decay=3.0)], "batchnorm1: expected epsilon > 0 and a decay from 0 to 1"),
        ([dl.LayerNorm("rows")], "layernorm1: over must be 'channels' or 'image', got 'rows'"),
        ([dl.LayerNorm(epsilon=0)], "layernorm1: epsilon must be a number > 0, got 0"),
        ([dl.InstanceNorm(affine=1)], "instancenorm1: affine must be True or False, got 1"),
        ([dl.LSTM(2, reverse="no")], "lstm1: reverse must be True or False, got 'no'"),
        ([dl.GroupNorm(3)], "groupnorm1: 3 groups do not divide the 4 channels"),
        ([dl.Dense(3), dl.InstanceNorm()], "instancenorm1: expected more than one number per"),
        ([dl.LeakyReLU(-1.0)], "leakyrelu1: scale must be a number >= 0, got -1.0"),
        ([dl.GELU("erf")], "gelu1: approximate must be 'none' or 'tanh', got 'erf'"),
        ([dl.PReLU(initial=float("nan"))], "prelu1: initial must be a finite number, got nan"),
        ([dl.Clip(1, 1)], "clip1: expected numbers low < high, at least one of them finite"),
        ([dl.HardSigmoid(-1)], "hardsigmoid1: expected finite numbers alpha > 0 and beta, got -1"),
        ([dl.AveragePool2D(2, count_padding=0)], "averagepool1: count_padding must be True or"),
        ([dl.CrossChannelNorm(0)], "crosschannelnorm1: window must be an integer >= 1, got 0"),
        ([dl.CrossChannelNorm(3, k=0)], "crosschannelnorm1: expected alpha >= 0, beta >= 0 and"),
        ([dl.Dense(3), dl.GlobalAveragePool2D()], "globalaveragepool1: expected images"),
        ([dl.Dense(3), dl.TransposedConv2D(3, 2)], "transposedconv1: expected images"),
        ([dl.TransposedConv2D(3, 2, cropping=5)], "transposedconv1: cropping .* leaves no output"),
        (
            [dl.TransposedConv2D(2, 2, stride=3, cropping="same")],
            "filters at least as large as the stride",
        ),
        ([dl.TransposedConv2D(3, 2, stride=0)], "stride must be one or two integers >= 1"),
        ([dl.Conv2D(3, 2, padding="equal")], "padding must be"),
        (
            [dl.ReLU(name="a"), dl.Conv2D(3, 2, name="b"), dl.Add(inputs=("a", "b"))],
            "add1: expected two or more inputs of one shape",
        ),
        (
            [dl.ReLU(name="a"), dl.Conv2D(3, 2, name="b"), dl.Concat(inputs=("a", "b"))],
            "concat1: expected two or more inputs that differ only in their channels",
        ),
        ([dl.Conv2D(3, "16")], "^conv1: filters must be an integer >= 1, got '16'"),
        ([dl.Conv2D(3, True)], "^conv1: filters must be an integer >= 1, got True"),
        ([dl.Conv2D(2.5, 4)], "^Conv2D: size must be one or two integers >= 1, got 2.5"),
        (
            [dl.Conv2D(3, 4, stride="2")],
            "^Conv2D: stride must be one or two integers >= 1, got '2'",
        ),
        ([dl.Conv2D(3, 4, padding="sam")], "^Conv2D: padding must be an integer >= 0"),
        ([dl.Conv2D(3, 4, groups="1")], "^conv1: groups must be an integer >= 1, got '1'"),
        (
            [dl.Conv2D(3, 4, weight_l2_factor="1")],
            "^conv1: factors of learning rate and L2 must be",
        ),
        ([dl.TransposedConv2D(3, None)], "^transposedconv1: filters must be an integer >= 1"),
        ([dl.Dense(-3)], "^dense1: outputs must be an integer >= 1, got -3"),
        ([dl.BatchNorm(epsilon="1")], "^batchnorm1: expected epsilon > 0 and a decay"),
        ([dl.CrossChannelNorm(5, alpha="1")], "^crosschannelnorm1: expected "),
        ([dl.Add(inputs=3)], "^add1: expected the names of two or more inputs, got 3"),
        ([dl.LSTM(4, returns="last"), dl.GRU(4)], r"^gru1: .* returns='sequence', got \(4,\)"),
        ([dl.ReLU(name=5)], "^layer names must be unique strings without '.' or '/', got 5"),
    ],
)
def test_one_line_names_the_layer_and_the_wrong_argument(layers, message):
    with pytest.raises(ValueError) as error:
        dl.Network(layers, (4, 8, 8))
    text = str(error.value)
    assert re.search(message, text) and "\n" not in text
