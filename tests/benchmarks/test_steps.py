"""Test that the benchmarks' steps equal the library's and PyTorch's, layer by layer."""

import argparse

import numpy as np
import pytest
from single_rank import blocked, numbers

import mpidl as dl
from benchmarks import accuracy, mpidl_step, prediction, subject, theirs, torch_step
from mpidl.errors import UserError
from mpidl.nn import zoo

LAYERS = [
    *(dl.Conv2D(3, 8, padding=1), dl.BatchNorm(), dl.ReLU(), dl.MaxPool2D(3, stride=2, padding=1)),
    *(dl.Conv2D(3, 8), dl.BatchNorm(), dl.ReLU(), dl.AveragePool2D(2), dl.Dense(10)),
]

# layers of every kind that also exists in PyTorch
BRANCHES = [
    dl.Conv2D(5, 8, stride=2, padding="same", name="first"),
    dl.ReLU(name="a"),
    dl.CrossChannelNorm(5, alpha=1e-2),
    dl.Conv2D(3, 8, padding=(1, 2), groups=2, dilation=(1, 2)),
    dl.BatchNorm(),
    dl.MaxPool2D((2, 3), stride=1, padding="same", name="b"),
    dl.Add(inputs=("a", "b"), name="sum"),
    dl.AveragePool2D(2, stride=1, padding="same"),
    dl.LeakyReLU(0.1),
    dl.MaxPool2D(3, stride=3, padding=((2, 1), (0, 2)), name="c"),
    dl.Conv2D(1, 4, after="sum"),
    dl.Tanh(),
    dl.GELU(),
    dl.Clip(-0.2, 0.2),
    dl.HardSwish(),
    dl.Swish(),
    dl.AveragePool2D(3, 1, 1, count_padding=False),
    dl.PReLU(shared=True),
    dl.Dropout(0.0),
    dl.StochasticDepth(0.0),
    dl.GlobalAveragePool2D(name="means"),
    dl.Sigmoid(name="gate"),
    dl.Multiply(inputs=("prelu1", "gate")),
    dl.Scale(0.5),
    dl.MaxPool2D(3, stride=3, padding=((2, 1), (0, 2)), name="d"),
    dl.ReLU(after="sum"),  # "sum" has several readers
    dl.MaxPool2D(3, stride=3, padding=(2, 1), name="e"),  # padding of more than half a window
    dl.Concat(inputs=("c", "d", "e")),
    dl.Dense(16),
    dl.Sigmoid(),
    dl.GELU("tanh"),
    dl.PReLU(),
    dl.Dense(10),
]


def small():
    net = dl.Network(LAYERS, (2, 9, 9), seed=1)
    return net, *subject.mini_batch(net.input_shape, 24, seed=1)


def test_a_mini_batch_depends_on_the_seed_alone():
    images, labels = subject.mini_batch((1, 4, 4), 20, seed=3)
    assert images.shape == (20, 1, 4, 4) and images.dtype == np.float32
    assert 0 <= images.min() < images.max() < 1 and set(labels) <= set(range(10))
    for a, b in zip((images, labels), subject.mini_batch((1, 4, 4), 20, seed=3), strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(images, subject.mini_batch((1, 4, 4), 20, seed=4)[0])


def test_networks_by_name_have_their_own_images():
    assert subject.network("digits").input_shape == (1, 28, 28)
    assert subject.network("cifar").input_shape == (3, 32, 32)
    assert subject.network("digits", [3, 16, 16]).input_shape == (3, 16, 16)


def test_networks_of_comparisons_have_no_dropout(monkeypatch):
    monkeypatch.setattr(
        subject.start,
        "network",
        lambda name, image, classes, seed: dl.Network([dl.Dropout(0.5), dl.Dense(2)], (1, 2, 2)),
    )
    assert subject.network("any").layers[0].probability == 0.5
    assert subject.network("any", dropout=False).layers[0].probability == 0.0


def test_a_step_learns_and_starts_again(world):
    net, *batch = small()
    step = mpidl_step.EagerStep(net, batch, world)
    first = [step() for _ in range(4)]
    assert first[-1] < first[0]
    assert {len(seconds) for seconds in vars(step.times).values()} <= {0, 4}
    step.reset()
    assert [step() for _ in range(4)] == first


def test_a_step_is_as_the_library_makes_it(world):
    """The weights must equal those of a training loop written with the library."""
    net, *batch = small()
    step = mpidl_step.EagerStep(net, batch, world)
    for _ in range(2):
        step()
    other, *arrays = small()
    x, y = blocked(world, *arrays)
    sgdm = dl.SGDM(learning_rate=0.01, momentum=0.9)
    for _ in range(2):
        _, gradients, other.state = dl.value_and_grad(
            lambda net, x, y: dl.softmax_cross_entropy(net(x), y)
        )(other, x, y)
        other.parameters = sgdm(other.parameters, world.gplus(gradients))
    assert dl.weights_sha256(net) == dl.weights_sha256(other)


RECURRENT = [dl.GRU(6), dl.LSTM(5, reverse=True), dl.LSTM(4, returns="last"), dl.Dense(10)]
NETWORKS = {
    "branches": lambda: dl.Network(BRANCHES, (2, 13, 10), seed=1),
    "recurrent": lambda: dl.Network(RECURRENT, (2, 5, 7), seed=1),
    "resnet": lambda: zoo.resnet((3, 8, 8)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_pytorch_computes_the_same_network_with_branches(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    net = NETWORKS[name]()
    images, labels = subject.mini_batch(net.input_shape, 20, seed=1)
    world = dl.OneRank()
    x, y = blocked(world, images, labels.astype(np.int32))
    loss, gradients, _ = dl.value_and_grad(mpidl_step.mean_loss)(net, x, y)
    model = torch_step.build_module(net).train()
    torch_loss = torch_step.cross_entropy(model(torch.from_numpy(images)), torch.tensor(labels))
    torch_loss.backward()
    assert float(world.gplus(loss)) == pytest.approx(torch_loss.item(), rel=1e-5)
    gradients = world.gplus(gradients)
    largest = max(np.abs(g).max() for g in gradients.values())
    learnables = dict(torch_step.named_learnables(model))
    assert set(learnables) == set(gradients)
    for key, gradient in gradients.items():
        expected = learnables[key].grad.numpy().reshape(gradient.shape)
        assert np.abs(gradient - expected).max() < 1e-3 * largest, key


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pytorch_computes_in_the_precision_of_the_benchmark(precision):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    net, images, labels = small()
    step = theirs.CpuStep(net, images, labels, "channels_last", precision=precision)
    dtypes = []
    step.module.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    losses = [step() for _ in range(3)]
    expected = torch.bfloat16 if precision == "bf16" else torch.float32
    assert dtypes == [expected] * 3 and losses[-1] < losses[0]
    learnables = dict(torch_step.named_learnables(step.module))
    assert {value.dtype for value in learnables.values()} == {torch.float32}
    scores = prediction.torch_pass(net, images, "channels_last", precision)()
    reference = prediction.torch_pass(net, images, "eager")()
    assert scores.dtype == np.float32
    is_close = np.allclose(scores, reference, rtol=0, atol=1e-5)
    assert is_close is (precision == "fp32")
    assert np.allclose(scores, reference, rtol=0, atol=0.05)


def test_layers_without_a_counterpart_in_pytorch_are_refused():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    for layer in (dl.TransposedConv2D(2, 2), dl.CrossChannelNorm(4)):
        with pytest.raises(UserError, match="cannot convert .* to PyTorch"):
            torch_step.build_module(dl.Network([layer], (2, 5, 5)))


def test_every_layer_is_on_the_tape():
    """Names and values must be the same whether layers are fused or run one by one."""
    net, images, labels = small()
    fused, _ = accuracy.our_step(net, images, labels)
    net.fuse = False
    single, _ = accuracy.our_step(net, images, labels)
    layers = [layer.name for layer in net.layers]
    assert [name for name in single if "." not in name] == layers
    assert {name for name in fused if "." in name} == set(net.parameters)
    for name, value in fused.items():
        if name not in ("conv1.bias", "conv2.bias"):  # zero except for rounding
            assert np.abs(value - single[name]).max() < 1e-4 * np.abs(single[name]).max(), name


def test_decisions_of_the_step_itself_change_nothing():
    net, images, labels = small()
    exact = dl.Network(net.layers, net.input_shape)
    exact.parameters = {k: v.astype(np.float64) for k, v in net.parameters.items()}
    free, activations = accuracy.our_step(exact, images.astype(np.float64), labels)
    decided = accuracy.exact_step(
        net, images, labels, accuracy.decide(net, images.astype(np.float64), activations)
    )
    for name, value in free.items():
        assert np.abs(value - decided[name]).max() <= 1e-12 * max(1, np.abs(value).max()), name


def test_errors_are_measured_and_zeros_left_out():
    net, images, labels = small()
    ours, activations = accuracy.our_step(net, images, labels)
    exact = accuracy.exact_step(net, images, labels, accuracy.decide(net, images, activations))
    errors = accuracy.errors(ours, exact)
    assert set(accuracy.zero_gradients(exact)) == {"conv1.bias", "conv2.bias"}
    assert set(errors) == set(ours) - {"conv1.bias", "conv2.bias"}
    assert max(norm for norm, _ in errors.values()) < 2e-5
    altered = ours | {"conv2.weight": ours["conv2.weight"] * np.float32(1.001)}
    norm, largest = accuracy.errors(altered, exact)["conv2.weight"]
    assert norm == pytest.approx(1e-3, rel=0.02) and largest == pytest.approx(1e-3, rel=0.02)


def test_one_other_decision_makes_large_errors():
    """Negative control: changing one decision of a ReLU makes the exact step's errors large."""
    net, images, labels = small()
    ours, activations = accuracy.our_step(net, images, labels)
    decisions = accuracy.decide(net, images, activations)
    flipped = decisions["relu2"].copy()
    flipped.flat[0] ^= True
    exact = accuracy.exact_step(net, images, labels, decisions | {"relu2": flipped})
    assert accuracy.errors(ours, exact)["conv2.weight"][0] > 1e-4


@pytest.mark.parametrize(("size", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (2, 1, 1)])
def test_a_maximum_at_decided_positions(size, stride, padding):
    pixels = numbers("decided", 18, 3, 7, 6)
    x = blocked(dl.OneRank(), pixels)
    net = dl.Network([dl.MaxPool2D(size, stride=stride, padding=padding)], (3, 7, 6))
    positions = accuracy.decide(net, pixels, {})["maxpool1"]
    args = ((size, size), (stride, stride), ((padding, padding),) * 2)
    expected = dl.max_pool2d(x, size, stride=stride, padding=padding)
    y = accuracy.decided_max(x, positions=positions, args=args)
    assert np.array_equal(y.local(), expected.local())
    dl.check_vjp(lambda x: accuracy.decided_max(x, positions=positions, args=args), x)


def test_errors_of_gradients_of_both_sides_in_bfloat16():
    """PyTorch's error is that of bfloat16; its float64 gradients are those of the reference."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    net = dl.Network(BRANCHES, (2, 13, 10), seed=1)
    batch = subject.mini_batch(net.input_shape, 20, seed=1)
    record = accuracy._measure_gradients(net, *batch, torch=True)
    by_reference = accuracy._measure_gradients(net, *batch, torch=False)
    assert list(record["ours"]) == list(record["torch"]) == list(by_reference["ours"])
    assert set(record["ours"]) == {accuracy.ALL, *net.parameters} - set(record["zero"])
    for name, (norm, largest) in record["ours"].items():
        assert by_reference["ours"][name] == pytest.approx((norm, largest), rel=1e-4), name
    assert 1e-3 < record["torch"][accuracy.ALL][0] < 0.5
    assert record["ours"][accuracy.ALL][0] < 0.5


def test_the_error_of_all_gradients_is_that_of_one_vector():
    exact = {"a.weight": np.array([3.0, 0.0]), "b.weight": np.array([[4.0]])}
    gradients = {"a.weight": np.float32([3.0, 0.3]), "b.weight": np.float32([[4.4]])}
    (norm, largest), *_ = accuracy.gradient_errors(gradients, exact).values()
    assert norm == pytest.approx(0.1) and largest == pytest.approx(0.1)


def test_the_errors_of_networks_with_branches_are_not_measured():
    options = argparse.Namespace(network="resnet", image=None, batch_size=4, precision="fp32")
    with pytest.raises(UserError, match="--network resnet: expected a network without branches"):
        accuracy._measure_seed(options, 0, torch=False)
