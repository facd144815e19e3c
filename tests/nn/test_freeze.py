"""Frozen layers: what is not differentiated, not computed, not changed; factors of the rates."""

import collections
import json

import numpy as np
import pytest
from cpu_builds import needs_kernels
from single_rank import SingleRank, all_images, assert_slopes, blocked, finite_differences, numbers

import mpidl as dl
from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.training.options.configuration import changed_on_resume

SHAPE = (2, 8, 8)
BACKWARD = ("conv2d_backward", "dense_backward", "batchnorm_dx", "activation_sums", "relu_dx")


def layers():
    return [
        dl.Conv2D(3, 6, padding=1),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.Conv2D(3, 6, padding=1),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.Add(inputs=("relu1", "relu2")),
        dl.Conv2D(3, 5),
        dl.BatchNorm(),
        dl.ReLU(),
        dl.Dense(4),
    ]


def network(seed=3, made=None):
    """With a state that is not the initial one."""
    net = dl.Network(layers() if made is None else made, SHAPE, seed=seed)
    net.state = {
        name: numbers(f"state {name}", *v.shape, low=0.3, dtype=np.float32)
        for name, v in net.state.items()
    }
    return net


def model_loss(net, images, labels):
    return dl.softmax_cross_entropy(net(images), labels)


def batch_of(world, count=37, dtype=np.float32):
    images = numbers("freeze images", count, *SHAPE).astype(np.float32)
    return blocked(world, images.astype(dtype), np.arange(count) * 3 % 4)


def step(world, net, **how):
    return dl.value_and_grad(model_loss, reduce=world)(net, *batch_of(world, **how))


@pytest.fixture
def calls(monkeypatch):
    """What of backward is called: {function: [what it was asked for]}."""
    found = collections.defaultdict(list)

    def counted(name, function):
        def call(*args, **options):
            needs = [a for a in args if isinstance(a, tuple) and a and type(a[0]) is bool]
            found[name] += needs or [None]
            return function(*args, **options)

        return call

    for backend in (cpu, reference):
        for name in BACKWARD:
            if hasattr(backend, name):
                monkeypatch.setattr(backend, name, counted(name, getattr(backend, name)))
    return found


@pytest.mark.parametrize("fuse", [True, False])
def test_backward_stops_above_what_is_frozen(world, calls, fuse):
    net = network()
    net.fuse = fuse
    step(world, net)
    everything = {name: len(found) for name, found in calls.items()}
    assert everything["conv2d_backward"] == 3 and everything["dense_backward"] == 1
    calls.clear()
    net.freeze("conv1", "batchnorm1", "conv2", "batchnorm2")
    _, gradients, state = step(world, net)
    assert len(calls["conv2d_backward"]) == 1 and len(calls["dense_backward"]) == 1
    assert calls["conv2d_backward"][0][:3] == (False, True, True)  # no gradient of its images
    assert list(gradients) == list(net.parameters)[8:]
    for name, value in state.items():
        assert (value is net.state[name]) == (name.split(".")[0] != "batchnorm3")
    calls.clear()
    net.freeze("conv3", "batchnorm3")
    _, gradients, state = step(world, net)
    assert list(gradients) == ["dense1.weight", "dense1.bias"]
    assert list(calls) == ["dense_backward"] and calls["dense_backward"][0][0] is False
    calls.clear()
    loss, gradients, state = step(world, net.freeze("dense1"))
    assert gradients == {} and not calls and np.isfinite(loss)
    assert all(state[name] is value for name, value in net.state.items())
    assert list(net.unfreeze(*net.layer_names).trainable) == list(net.parameters)


def test_upper_gradients_are_those_of_the_whole_network(world):
    """Below there is no batch normalization: it is the same function."""
    made = [dl.Conv2D(3, 6), dl.ReLU(), dl.Conv2D(3, 6), dl.BatchNorm(), dl.ReLU(), dl.Dense(4)]
    net = dl.Network(made, SHAPE, seed=1)
    whole_net = step(world, net)
    loss, gradients, _ = step(world, net.freeze("conv1"))
    assert loss.tobytes() == whole_net[0].tobytes()
    assert list(gradients) == list(net.parameters)[2:]
    for name, gradient in gradients.items():
        assert gradient.tobytes() == whole_net[1][name].tobytes()


FROZEN = {
    "in the middle": ["conv2", "batchnorm2"],
    "a normalization alone": ["batchnorm2"],
    "a convolution alone": ["conv2"],
    "the first convolution": ["conv1"],
    "at the end": ["conv3", "batchnorm3", "dense1"],
    "a branch and the end": ["conv2", "batchnorm2", "dense1"],
}


VARIANTS = ("a normalization alone", "the first convolution", "at the end")  # of the others
GRADIENTS = [
    pytest.param(names, id=case, marks=[pytest.mark.slow("ranks")] * (case in VARIANTS))
    for case, names in FROZEN.items()
]


@pytest.mark.parametrize("names", GRADIENTS)
def test_gradients_go_through_frozen_layers(world, names):
    net = network().freeze(*names)
    net.parameters = {name: v.astype(np.float64) for name, v in net.parameters.items()}
    net.state = {name: v.astype(np.float64) for name, v in net.state.items()}
    _, gradients, _ = step(world, net, dtype=np.float64)
    images, labels = batch_of(world, dtype=np.float64)

    def loss(p):
        return world.gplus(model_loss(net.bind(p), images, labels))

    moving = {name: net.parameters[name] for name in gradients}
    assert not [name for name in moving if name.split(".")[0] in names]
    assert_slopes(gradients, finite_differences(loss, moving, max_elements=6), 5e-6)


@needs_kernels
@pytest.mark.parametrize("names", FROZEN.values(), ids=FROZEN)
def test_fused_layers_have_the_bytes_of_the_separate_ones(world, names):
    found = []
    for fuse in (True, False):
        net = network().freeze(*names)
        net.fuse = fuse
        loss, gradients, state = step(world, net)
        tables = [{k: np.asarray(v).tobytes() for k, v in t.items()} for t in (gradients, state)]
        found.append((loss.tobytes(), tables))
    assert found[0] == found[1]


def test_a_frozen_normalization_uses_its_running_state(world):
    made = [dl.BatchNorm(name="norm")]
    net = network(made=made).freeze("norm")
    images, _ = batch_of(world)
    trained = net.bind(net.parameters)(images)
    assert trained.local().tobytes() == net(images).local().tobytes()
    mean, variance = net.state["norm.mean"], net.state["norm.variance"]
    expected = (images.local() - mean[:, None, None]) / np.sqrt(variance + 1e-5)[:, None, None]
    np.testing.assert_allclose(trained.local(), expected, rtol=1e-5, atol=1e-6)


def test_factors_of_0_keep_the_learnables_and_the_statistics_of_the_mini_batch(world):
    """MATLAB's way of freezing a batch normalization."""
    norm = dl.BatchNorm(scale_learn_rate_factor=0.0, offset_learn_rate_factor=0.0)
    made = [dl.Conv2D(3, 4), norm, dl.ReLU(), dl.Dense(4)]
    net, plain = network(made=made), network(made=[made[0], dl.BatchNorm(), *made[2:]])
    found, wanted = step(world, net), step(world, plain)
    assert found[0].tobytes() == wanted[0].tobytes()
    assert set(wanted[1]) - set(found[1]) == {"batchnorm1.gamma", "batchnorm1.beta"}
    for name, value in wanted[2].items():
        assert found[2][name].tobytes() == value.tobytes() != net.state[name].tobytes()


def test_a_frozen_dropout_drops_nothing(world):
    net = dl.Network([dl.Dropout(0.5)], SHAPE)
    images, _ = batch_of(world)
    dropped = all_images(world, net.bind({})(images))  # a rank may have no images
    assert (dropped == 0).mean() > 0.4
    net.freeze("dropout1")
    assert net.bind({})(images).local().tobytes() == images.local().tobytes()


def test_one_result_on_any_number_of_ranks(world):
    alone, found = SingleRank(), []
    for here in (alone, world):
        net = network().freeze("conv1", "batchnorm1", "batchnorm3")
        loss, gradients, state = dl.value_and_grad(model_loss)(net, *batch_of(here))
        tables = here.gplus(gradients), state
        found.append(
            (here.gplus(loss).tobytes(), [{k: v.tobytes() for k, v in t.items()} for t in tables])
        )
    assert found[0] == found[1]


def test_steps_leave_frozen_layers_as_they_are(world):
    net = network().freeze("conv1", "batchnorm1")
    before, state = net.parameters, net.state
    sgdm = dl.SGDM(0.1, l2=0.01, **net.factors)
    for _ in range(3):
        _, gradients, net.state = step(world, net)
        net.parameters = sgdm(net.parameters, gradients)
    for name, value in before.items():
        frozen = name.split(".")[0] in ("conv1", "batchnorm1")
        assert (net.parameters[name].tobytes() == value.tobytes()) == frozen
    assert net.state["batchnorm1.mean"].tobytes() == state["batchnorm1.mean"].tobytes()
    assert net.state["batchnorm2.mean"].tobytes() != state["batchnorm2.mean"].tobytes()
    with pytest.raises(ValueError, match="missing conv1.weight.*net.factors"):
        dl.SGDM(0.1)(net.parameters, step(world, net)[1])


def test_the_factors_of_layers_reach_the_optimizer():
    made = [
        dl.Conv2D(
            3, 4, weight_learn_rate_factor=2.0, bias_learn_rate_factor=3.0, bias_l2_factor=0.5
        ),
        dl.BatchNorm(scale_learn_rate_factor=4.0, offset_l2_factor=0.25),
        dl.Dense(
            4, weight_learn_rate_factor=20.0, weight_l2_factor=0.0, bias_learn_rate_factor=20.0
        ),
        dl.Dense(4, trainable=False),
    ]
    factors = dl.Network(made, SHAPE).factors
    rates, decays = factors["learning_rate_factors"], factors["l2_factors"]
    assert list(rates.values()) == [2, 3, 4, 1, 20, 20, 0, 0]
    assert list(decays.values()) == [1, 0.5, 0, 0.25, 0, 0, 1, 0]
    plain = dl.Network([dl.Conv2D(3, 4), dl.BatchNorm(), dl.Dense(4)], SHAPE).factors
    assert set(plain["learning_rate_factors"].values()) == {1.0}
    for name, decay in plain["l2_factors"].items():
        assert decay == (1.0 if name.endswith(".weight") else 0.0)


def test_training_honours_them(world):
    """dl.train: frozen layers keep their bytes; a factor is a factor of the rate."""
    images = (numbers("train", 48, *SHAPE, low=0) * 255).astype(np.uint8)
    store = dl.ArrayDatastore(images, np.arange(48) % 4)
    options = dl.TrainingOptions(epochs=1, batch_size=48, learning_rate=0.01, l2=0.0)

    def trained(*frozen, **factors):
        made = [dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(4, **factors)]
        net = dl.Network(made, SHAPE, seed=1).freeze(*frozen)
        before = net.parameters
        dl.train(net, store, options, world=world)
        return {name: net.parameters[name] - before[name] for name in before}

    plain, frozen = trained(), trained("conv1")
    assert not frozen["conv1.weight"].any() and plain["conv1.weight"].any()
    assert frozen["dense1.weight"].tobytes() == plain["dense1.weight"].tobytes()
    twice = trained(weight_learn_rate_factor=2.0)
    np.testing.assert_allclose(twice["dense1.weight"], 2 * plain["dense1.weight"], atol=1e-7)
    assert twice["dense1.bias"].tobytes() == plain["dense1.bias"].tobytes()


def test_a_resumed_run_may_not_freeze_others():
    net = network()
    specs = json.loads(json.dumps(net.spec()))  # as a checkpoint has them
    now = {"options": dl.TrainingOptions().as_dict(), "network": specs, "fingerprint": "f"}
    changed_on_resume(now, {**now, "network": network().spec()})
    frozen = {**now, "network": net.freeze("conv1").spec()}
    with pytest.raises(dl.UserError, match="layer conv1 differs in trainable"):
        changed_on_resume(now, frozen)


def test_names_that_are_not_there():
    with pytest.raises(KeyError, match="no layer conv9: did you mean conv"):
        network().freeze("conv9")


def test_freezing_touches_the_network_alone(world):
    made = layers()
    net = dl.Network(made, SHAPE)
    other = dl.Network(net.layers, SHAPE).freeze("conv1")
    assert made[0].trainable and net["conv1"].trainable and not other["conv1"].trainable
    assert all_images(world, net(batch_of(world)[0])).shape == (37, 4)
