"""Compare training steps on the emulated GPU, recorded and eager, with the CPU."""

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl import backends, losses
from mpidl.data.loading import device_queue
from mpidl.errors import Fault
from mpidl.evaluation import evaluate, predict
from mpidl.training.files.model_file import weights_sha256
from mpidl.training.optimizers import Momentum, Optimizer, Rate

SIDE, CLASSES = 10, 3


def small():
    """Return a network with all kinds of sums, odd numbers of channels and overlapping windows."""
    layers = [
        dl.Conv2D(3, 5, padding=1),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.MaxPool2D(3, stride=2),
        dl.Conv2D(3, 8, stride=2),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.Dense(7),
        dl.ReLU(),
        dl.Dense(CLASSES),
    ]
    return dl.Network(layers, (1, SIDE, SIDE), seed=1)


def pictures(count, side=SIDE, classes=CLASSES, dtype=np.uint8):
    images = numbers("gpu pictures", count, 1, side, side, low=0, high=256)
    labels = np.arange(count) * 7 % classes
    images[np.arange(count), 0, labels, :] = 255  # the class is a bright row
    return dl.ArrayDatastore(images.astype(np.uint8).astype(dtype), labels)


def trained(world, store=None, net=None, **options):
    net = small() if net is None else net
    settings = dl.TrainingOptions(**{"epochs": 2, "batch_size": 40, "verbose_every": 0} | options)
    dl.train(net, pictures(90) if store is None else store, settings, world=world)
    return net


@pytest.mark.slow("gpu")
def test_a_step_of_digits_agrees_with_the_cpu(world):
    """Compare how one step changes the weights, for a mini-batch smaller than the recorded one.

    Later steps are not compared, because a ReLU that flips would amplify the difference.
    """
    train, _ = dl.data.digits().split(0.9, seed=0)
    store = train.subset(np.arange(0, len(train), len(train) // 20)[:20])
    steps = []
    for rank in (world, dl.World(threads=1)):
        net = dl.Network(dl.nn.zoo.digits((1, 28, 28), 10).layers, (1, 28, 28))
        start = dict(net.parameters)
        # with a large learning rate, the rounding of weights is small compared to their change
        trained(rank, store, net, epochs=1, batch_size=32, learning_rate=1.0, l2=0.0)
        steps.append({k: v.astype(np.float64) - start[k] for k, v in net.parameters.items()})
    errors = {
        name: np.linalg.norm(steps[0][name] - expected) / np.linalg.norm(expected)
        for name, expected in steps[1].items()
        # batch normalization cancels a convolution's bias, whose gradient is noise
        if not (name.startswith("conv") and name.endswith(".bias"))
    }
    worst = max(errors, key=errors.get)
    print(f"largest relative difference: {errors[worst]:.1e} ({worst})")
    assert errors[worst] < 1e-5


def trained_eagerly(world, optimizer, net, loss=losses.cross_entropy):
    """Train a network without recording; the same images as `pictures(80)`, unshuffled."""
    net.to(world.device)
    queue = dl.MinibatchQueue(pictures(80), 40, world=world, shuffle="never")
    for epoch in range(2):
        for images, labels in queue.epoch(epoch):
            _, gradients, net.state = dl.value_and_grad(loss)(net, images, labels)
            net.parameters = optimizer(net.parameters, world.gplus(gradients))
    return net.to(None)


UNSHUFFLED = {"shuffle": "never", "batchnorm_statistics": "moving"}


def test_recorded_and_eager_steps_give_the_same_bytes(world):
    recorded = trained(world, pictures(80), l2=0.001, momentum=0.5, **UNSHUFFLED)
    eager = trained_eagerly(world, dl.SGDM(learning_rate=0.01, momentum=0.5, l2=0.001), small())
    assert weights_sha256(eager) == weights_sha256(recorded)


def test_a_loss_may_read_averages_that_the_step_updates(world):
    """The running averages are overwritten after the last kernel that reads them."""
    nets = small(), small()

    def with_own_scores(net):  # trains on the scores and on those of an inference pass
        def loss(scored, images, labels):
            scores = dl.ops.add(scored(images), net(images))
            return dl.softmax_cross_entropy(scores, labels)

        return loss

    optimizer = dl.SGDM(learning_rate=0.01, momentum=0.5)
    values = {"l2": 0.0, "momentum": 0.5, "learning_rate": 0.01, **UNSHUFFLED}
    recorded = trained(world, pictures(80), nets[0], loss=with_own_scores(nets[0]), **values)

    eager = trained_eagerly(world, optimizer, nets[1], with_own_scores(nets[1]))
    assert weights_sha256(eager) == weights_sha256(recorded)


@pytest.mark.parametrize("device", [0, 1], indirect=True)
def test_a_loss_may_contain_a_sum_twice(world, capsys):
    """The last kernel of the step folds each sum, and no block reads what another stores."""
    losses_of_epochs = []
    for times in (1, 2):

        def loss(net, images, labels, times=times):
            value = dl.softmax_cross_entropy(net(images), labels)
            return value if times == 1 else dl.ops.add(value, value)

        trained(world, loss=loss, epochs=1, learning_rate=1e-9, l2=0.0)
        (line,) = capsys.readouterr().out.splitlines()
        losses_of_epochs.append(float(line.split()[3].strip(",")))
    assert losses_of_epochs[1] == pytest.approx(2 * losses_of_epochs[0], rel=1e-4)


class HalfSteps(Optimizer):
    """An optimizer that reads the old weights after it has computed the new ones."""

    def apply(self, parameters, gradients, numbers):
        new = [*super().apply(parameters, gradients, numbers).values()]
        old = [*parameters.values()]
        backend = backends.of_array(old[0])
        zeros = [[backend.zeros_like(weight) for weight in old]]
        # old - (-0.5 * new) with a decay of -1 in the gradient: a mixture of old and new weights
        mixed = backend.optimizer_step("sgdm", old, new, zeros, [-0.5, 0.0], [-1.0] * len(old))
        return dict(zip(parameters, mixed, strict=True))


def test_an_optimizer_may_read_the_old_weights_after_its_step(world):
    optimizers = [HalfSteps(0.05, Rate(), Momentum(0.9)) for _ in range(2)]
    net = small()
    options = dl.TrainingOptions(epochs=2, batch_size=40, verbose_every=0, **UNSHUFFLED)
    dl.train(net, pictures(80), options, world=world, optimizer=optimizers[0])
    eager = trained_eagerly(world, optimizers[1], small())
    assert weights_sha256(eager) == weights_sha256(net)


def test_graphs_do_not_change_a_byte(world):
    assert (
        len({weights_sha256(trained(world, graphs=graphs, epochs=1)) for graphs in ("auto", "off")})
        == 1
    )


@pytest.mark.slow("gpu")
@pytest.mark.parametrize("device", [1, 2], indirect=True)
def test_thread_schedules_do_not_change_a_byte(world, emulated):
    weights = weights_sha256(trained(world))
    with emulated(0) as device:
        world.device = device
        assert weights_sha256(trained(world)) == weights


def test_ranks_on_one_gpu_share_its_memory(world, monkeypatch):
    store = pictures(30)
    nbytes = store.images.nbytes + 4 * len(store)  # including the labels
    monkeypatch.setattr(device_queue, "RESIDENT", (2 * nbytes + 1) / world.device.memory)
    for sharers, resident in ((1, True), (2, True), (3, False)):
        world.device.sharers = sharers
        queue = device_queue.DeviceQueue(store, 10, 0, world, "never")
        assert queue.resident == resident


def test_a_data_set_is_resident_only_in_free_memory(world, monkeypatch):
    store = pictures(30)
    nbytes = store.images.nbytes + 4 * len(store)
    for free, resident in ((2 * nbytes, True), (2 * nbytes - 1, False)):
        monkeypatch.setattr(world.device, "free_memory", lambda free=free: free, raising=False)
        assert device_queue.DeviceQueue(store, 10, 0, world, "never").resident == resident


def test_a_step_that_does_not_fit_beside_the_data_set_gets_its_memory(world, monkeypatch):
    """The data set is then uploaded by mini-batches, and the weights are the same."""
    expected = weights_sha256(trained(world, epochs=1))
    resident, read = [], device_queue.Reader.read

    def limited(reader):
        resident.append(reader.resident)
        if reader.resident:
            raise MemoryError("no memory for the step")
        return read(reader)

    monkeypatch.setattr(device_queue.Reader, "read", limited)
    assert weights_sha256(trained(world, epochs=1)) == expected
    assert resident == [True, False]


@pytest.mark.parametrize("frozen", ["dense1", "dense2", "dense3"])
def test_frozen_weights_are_not_trained(world, frozen):
    layers = [dl.Dense(6), dl.ReLU(), dl.Dense(5), dl.ReLU(), dl.Dense(CLASSES)]
    net = dl.Network(layers, (1, SIDE, SIDE), seed=1).freeze(frozen)
    before = dict(net.parameters)
    host = dl.Network(layers, (1, SIDE, SIDE), seed=1).freeze(frozen)
    trained(world, net=net)
    trained(dl.World(threads=1), net=host)
    for name, value in net.parameters.items():
        assert np.array_equal(value, before[name]) == name.startswith(frozen), name
        np.testing.assert_allclose(value, host.parameters[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow("gpu")
def test_data_larger_than_the_device_memory_are_staged(world, monkeypatch):
    expected = weights_sha256(trained(world))
    monkeypatch.setattr(device_queue, "RESIDENT", 0.0)
    assert weights_sha256(trained(world)) == expected


def test_float_pixels_are_not_divided(world):
    store = pictures(50, dtype=np.float32)
    store.images /= np.float32(255)
    floats = trained(world, store, epochs=1)
    expected = trained(world, pictures(50), epochs=1)
    assert weights_sha256(floats) == weights_sha256(expected)


@pytest.mark.slow("gpu")
def test_more_epochs_allocate_no_more_memory(world, device):
    sizes, totals, allocate = [], [], device.allocate
    device.allocate = lambda nbytes: sizes.append(nbytes) or allocate(nbytes)
    for epochs in (1, 1, 4):
        trained(world, epochs=epochs)
        totals.append(sum(sizes))
    assert totals[1] - totals[0] == totals[2] - totals[1] > 0


def test_evaluation_and_prediction_agree_with_the_cpu(world):
    net, store = small(), pictures(50)
    host = dl.World(threads=1)
    result, expected = (
        evaluate.evaluate(net, store, world=w, batch_size=40) for w in (world, host)
    )
    assert result.accuracy == expected.accuracy and result.images == 50
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    scores = predict.predict(net, store, world=world, batch_size=40)
    expected = predict.predict(net, store, world=host)
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-7)
    assert not net.on_device


@pytest.mark.slow("gpu")
def test_training_reduces_the_loss(world, capsys):
    trained(world, epochs=6, learning_rate=0.05)
    losses = [float(line.split()[3].strip(",")) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < 0.7 * losses[0]


def test_a_loss_that_is_not_finite_stops_the_run(world):
    with pytest.raises(Fault, match="iteration 2"):
        trained(world, learning_rate=1e30)


def test_a_failed_recording_leaves_the_network_on_the_host(world, device, monkeypatch):
    def fail(nbytes):
        raise MemoryError("no room")

    net = small()
    with monkeypatch.context() as patch:
        patch.setattr(device, "pinned", fail)
        with pytest.raises(MemoryError, match="no room"):
            trained(world, net=net)
    assert not net.on_device
    hashes = {weights_sha256(trained(world, net=n, epochs=1)) for n in (net, small())}
    assert len(hashes) == 1


def test_a_loss_without_kernels_is_refused(world):
    net = small().to(world.device)
    ((images, labels),) = dl.MinibatchQueue(pictures(20), 20, world=world).epoch(0)
    with pytest.raises(
        TypeError, match="has no GPU kernel, but .* is on a GPU: run with --device cpu"
    ):
        dl.value_and_grad(lambda net, x, y: dl.mean(dl.exp(net(x))))(net, images, labels)


ALL_LAYERS = [
    dl.Conv2D(3, 8, padding="same", name="first"),
    dl.BatchNorm(),
    dl.ReLU(name="a"),
    dl.CrossChannelNorm(5),
    dl.LeakyReLU(),
    dl.LayerNorm(),
    dl.PReLU(),
    dl.GELU(),
    dl.GroupNorm(4),
    dl.Pad2D(((0, 1), (1, 0))),
    dl.HardSwish(),
    dl.AveragePool2D(2, 1, count_padding=False),
    dl.ChannelShuffle(4),
    dl.ChannelSlice(1, 7),
    dl.Resize2D(scale=1.5, mode="bilinear"),
    dl.AdaptiveAveragePool2D(6),
    dl.Conv2D(3, 8, padding="same"),
    dl.Dropout(0.25),
    dl.Tanh(name="b"),
    dl.Add(inputs=("a", "b"), name="sum"),
    dl.TransposedConv2D(2, 4, stride=2, name="up"),
    dl.MaxPool2D(2, name="down"),
    dl.Concat(inputs=("sum", "down"), name="both"),
    dl.GlobalAveragePool2D(),
    dl.Sigmoid(name="gate"),
    dl.Multiply(inputs=("both", "gate")),
    dl.Scale(0.5),
    dl.StochasticDepth(0.1),
    dl.InstanceNorm(),
    dl.Sigmoid(),
    dl.LayerNorm("image"),
    dl.HardSigmoid(),
    dl.LSTM(5, truncate=4),
    dl.GRU(6, reverse=True),
    dl.Flatten(),
    dl.Tanh(),
    dl.PReLU(shared=True),
    dl.GELU("tanh"),
    dl.Swish(),
    dl.Clip(-0.5, 6),
    dl.Dropout(0.1),
    dl.Dense(6),
    dl.Sigmoid(),
    dl.Dense(3),
]


def trained_parameters(world, **options):
    """Train a network with all types of layers for an epoch, with a smaller last mini-batch."""
    pixels = np.random.default_rng(0).integers(0, 256, (70, 1, 6, 6), dtype=np.uint8)
    store, net = (
        dl.ArrayDatastore(pixels, np.arange(70) % 3),
        dl.Network(ALL_LAYERS, (1, 6, 6), seed=1),
    )
    return trained(world, store, net, epochs=1, learning_rate=0.1, **options).parameters


def test_a_network_of_all_layers_is_trained_as_on_the_cpu(world):
    """Every step drops the same elements as on the CPU. Another seed gives different weights."""
    launched, replayed = trained_parameters(world, graphs="off"), trained_parameters(world)
    host = dl.World(threads=1)
    expected, reseeded = trained_parameters(host), trained_parameters(host, seed=2)
    for name, weights in expected.items():
        assert np.array_equal(launched[name], replayed[name])
        assert abs(launched[name] - weights).max() <= 1e-4 * max(abs(weights).max(), 0.1)
    assert abs(reseeded["dense2.weight"] - expected["dense2.weight"]).max() > 1e-3


@pytest.mark.slow("gpu")
def test_a_network_from_onnx_is_trained_as_on_the_cpu(world, tmp_path):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    from onnx_models import imported_network

    store = pictures(70, side=6)
    options = {"learning_rate": 0.05, "normalization": "zscore"}
    nets = [
        trained(rank, store, imported_network(tmp_path), **options)
        for rank in (world, dl.World(threads=1))
    ]
    start = imported_network(tmp_path).parameters
    for name, expected in nets[1].parameters.items():
        difference = abs(nets[0].parameters[name] - expected).max()
        assert difference <= 1e-4 * max(abs(expected).max(), 0.1), name
        assert not np.array_equal(start[name], expected), name
