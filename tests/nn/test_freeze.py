"""Test frozen layers, which have no backward pass and do not change, and learning-rate factors."""

import collections
import json

import numpy as np
import pytest
from cpu_builds import needs_kernels
from network_steps import (
    conv_norm_relu,
    fused_and_separate,
    in_float64,
    model_loss,
    step,
    step_bytes,
    table_bytes,
)
from single_rank import SingleRank, all_images, assert_slopes, blocked, finite_differences, numbers

import mpidl as dl
from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.backends import settings
from mpidl.training.files.resume_changes import refuse_changes

SHAPE = (2, 8, 8)
BACKWARD = ("conv2d_backward", "dense_backward", "batchnorm_dx", "activation_sums", "relu_dx")


def layers():
    first, second = (conv_norm_relu(3, 6, padding=1) for _ in range(2))
    return [*first, *second, dl.Add(("relu1", "relu2")), *conv_norm_relu(3, 5), dl.Dense(4)]


def network(network_layers=None):
    """Return a network whose state differs from the initial state."""
    net = dl.Network(network_layers or layers(), SHAPE, seed=3)
    net.state = {
        name: numbers(f"state {name}", *v.shape, low=0.3, dtype=np.float32)
        for name, v in net.state.items()
    }
    return net


def batch_of(world, count=37, dtype=np.float32):
    images = numbers("freeze images", count, *SHAPE).astype(np.float32)
    return blocked(world, images.astype(dtype), np.arange(count) * 3 % 4)


def training_step(world, net, **batch_options):
    return step(world, net, batch_of(world, **batch_options))


@pytest.fixture
def calls(monkeypatch):
    """Record the calls of backward functions: {function: [argument `needs` of each call]}."""
    calls = collections.defaultdict(list)

    def counted(name, function):
        def call(*args, **options):
            needs = [a for a in args if isinstance(a, tuple) and a and type(a[0]) is bool]
            calls[name] += needs or [None]
            return function(*args, **options)

        return call

    for backend in (cpu, reference):
        for name in BACKWARD:
            if hasattr(backend, name):
                monkeypatch.setattr(backend, name, counted(name, getattr(backend, name)))
    return calls


@pytest.mark.parametrize("fuse", [True, False])
def test_backward_stops_above_frozen_layers(world, calls, fuse):
    net = network()
    net.fuse = fuse
    training_step(world, net)
    assert len(calls["conv2d_backward"]) == 3 and len(calls["dense_backward"]) == 1
    calls.clear()
    net.freeze("conv1", "batchnorm1", "conv2", "batchnorm2")
    _, gradients, state = training_step(world, net)
    assert len(calls["conv2d_backward"]) == 1 and len(calls["dense_backward"]) == 1
    assert calls["conv2d_backward"][0][:3] == (False, True, True)  # no gradient of the images
    assert list(gradients) == list(net.parameters)[8:]
    for name, value in state.items():
        assert (value is net.state[name]) == (name.split(".")[0] != "batchnorm3")
    calls.clear()
    net.freeze("conv3", "batchnorm3")
    _, gradients, state = training_step(world, net)
    assert list(gradients) == ["dense1.weight", "dense1.bias"]
    assert list(calls) == ["dense_backward"] and calls["dense_backward"][0][0] is False
    calls.clear()
    loss, gradients, state = training_step(world, net.freeze("dense1"))
    assert gradients == {} and not calls and np.isfinite(loss)
    assert all(state[name] is value for name, value in net.state.items())
    assert list(net.unfreeze(*net.layer_names).trainable) == list(net.parameters)


def test_freezing_keeps_the_gradients_above(world):
    """Freezing a layer without batch normalization does not change the other gradients."""
    stack = [dl.Conv2D(3, 6), dl.ReLU(), *conv_norm_relu(3, 6), dl.Dense(4)]
    net = dl.Network(stack, SHAPE, seed=1)
    expected_loss, expected, _ = training_step(world, net)
    loss, gradients, _ = training_step(world, net.freeze("conv1"))
    assert loss.tobytes() == expected_loss.tobytes()
    assert list(gradients) == list(net.parameters)[2:]
    for name, gradient in gradients.items():
        assert gradient.tobytes() == expected[name].tobytes()


FROZEN = {
    "in the middle": ["conv2", "batchnorm2"],
    "a normalization alone": ["batchnorm2"],
    "a convolution alone": ["conv2"],
    "the first convolution": ["conv1"],
    "at the end": ["conv3", "batchnorm3", "dense1"],
    "a branch and the end": ["conv2", "batchnorm2", "dense1"],
}
SLOW_CASES = ("a normalization alone", "the first convolution", "at the end")
GRADIENTS = [
    pytest.param(names, id=case, marks=[pytest.mark.slow("ranks")] * (case in SLOW_CASES))
    for case, names in FROZEN.items()
]


@pytest.mark.slow_on_ranks
@pytest.mark.parametrize("names", GRADIENTS)
def test_gradients_go_through_frozen_layers(world, names):
    net = in_float64(network().freeze(*names))
    _, gradients, _ = training_step(world, net, dtype=np.float64)
    images, labels = batch_of(world, dtype=np.float64)

    def loss(p):
        return world.gplus(model_loss(net.bind(p), images, labels))

    moving = {name: net.parameters[name] for name in gradients}
    assert not [name for name in moving if name.split(".")[0] in names]
    assert_slopes(gradients, finite_differences(loss, moving, max_elements=6), 5e-6)


@needs_kernels
@pytest.mark.parametrize("names", FROZEN.values(), ids=FROZEN)
def test_fused_layers_have_the_bytes_of_the_separate_ones(world, names):
    fused, separate = fused_and_separate(lambda: network().freeze(*names))
    batch = batch_of(world)
    assert step_bytes(world, fused, batch) == step_bytes(world, separate, batch)


@needs_kernels
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("filters", [1, 3, 20])
def test_earlier_layers_have_the_same_gradients_below_a_frozen_convolution(
    filters, precision, world, monkeypatch
):
    monkeypatch.setattr(settings, "precision", precision)
    names = "conv1.weight", "batchnorm1.gamma"

    def gradients(*frozen):
        net = network([*conv_norm_relu(3, 8), *conv_norm_relu(3, filters), dl.Dense(4)])
        computed = training_step(world, net.freeze(*frozen))[1]
        return [computed[name].tobytes() for name in names]

    assert gradients() == gradients("conv2")


def test_a_frozen_normalization_uses_its_running_state(world):
    net = network([dl.BatchNorm(name="norm")]).freeze("norm")
    images, _ = batch_of(world)
    trained = net.bind(net.parameters)(images)
    assert trained.local().tobytes() == net(images).local().tobytes()
    mean, variance = net.state["norm.mean"], net.state["norm.variance"]
    expected = (images.local() - mean[:, None, None]) / np.sqrt(variance + 1e-5)[:, None, None]
    np.testing.assert_allclose(trained.local(), expected, rtol=1e-5, atol=1e-6)


def test_factors_of_0_keep_the_learnables_and_the_statistics_of_the_mini_batch(world):
    """MATLAB freezes a batch normalization by setting its learning-rate factors to 0."""
    norm = dl.BatchNorm(scale_learn_rate_factor=0.0, offset_learn_rate_factor=0.0)
    net, plain = (
        network([dl.Conv2D(3, 4), layer, dl.ReLU(), dl.Dense(4)])
        for layer in (norm, dl.BatchNorm())
    )
    loss, gradients, state = training_step(world, net)
    plain_loss, plain_gradients, plain_state = training_step(world, plain)
    assert loss.tobytes() == plain_loss.tobytes()
    assert set(plain_gradients) - set(gradients) == {"batchnorm1.gamma", "batchnorm1.beta"}
    assert table_bytes(state) == table_bytes(plain_state)
    for name, value in state.items():
        assert value.tobytes() != net.state[name].tobytes()


def test_a_frozen_dropout_drops_nothing(world):
    net = dl.Network([dl.Dropout(0.5)], SHAPE)
    images, _ = batch_of(world)
    dropped = all_images(world, net.bind({})(images))  # a rank may have no images
    assert (dropped == 0).mean() > 0.4
    net.freeze("dropout1")
    assert net.bind({})(images).local().tobytes() == images.local().tobytes()


def test_one_result_on_any_number_of_ranks(world):
    net = network().freeze("conv1", "batchnorm1", "batchnorm3")
    expected = step_bytes(SingleRank(), net, batch_of(SingleRank()))
    assert step_bytes(world, net, batch_of(world)) == expected


def test_steps_leave_frozen_layers_as_they_are(world):
    net = network().freeze("conv1", "batchnorm1")
    parameters, state = net.parameters, net.state
    sgdm = dl.SGDM(0.1, l2=0.01, **net.factors)
    for _ in range(3):
        _, gradients, net.state = training_step(world, net)
        net.parameters = sgdm(net.parameters, gradients)
    for name, value in parameters.items():
        frozen = name.split(".")[0] in ("conv1", "batchnorm1")
        assert (net.parameters[name].tobytes() == value.tobytes()) == frozen
    assert net.state["batchnorm1.mean"].tobytes() == state["batchnorm1.mean"].tobytes()
    assert net.state["batchnorm2.mean"].tobytes() != state["batchnorm2.mean"].tobytes()
    with pytest.raises(ValueError, match="missing conv1.weight.*net.factors"):
        dl.SGDM(0.1)(net.parameters, training_step(world, net)[1])


def test_the_factors_of_layers_reach_the_optimizer():
    conv = {"weight_learn_rate_factor": 2.0, "bias_learn_rate_factor": 3.0, "bias_l2_factor": 0.5}
    norm = {"scale_learn_rate_factor": 4.0, "offset_l2_factor": 0.25}
    dense = {"weight_learn_rate_factor": 20.0, "weight_l2_factor": 0, "bias_learn_rate_factor": 20}
    stack = [dl.Conv2D(3, 4, **conv), dl.BatchNorm(**norm), dl.Dense(4, **dense)]
    factors = dl.Network([*stack, dl.Dense(4, trainable=False)], SHAPE).factors
    rates, decays = factors["learning_rate_factors"], factors["l2_factors"]
    assert list(rates.values()) == [2, 3, 4, 1, 20, 20, 0, 0]
    assert list(decays.values()) == [1, 0.5, 0, 0.25, 0, 0, 1, 0]
    plain = dl.Network([dl.Conv2D(3, 4), dl.BatchNorm(), dl.Dense(4)], SHAPE).factors
    assert set(plain["learning_rate_factors"].values()) == {1.0}
    for name, decay in plain["l2_factors"].items():
        assert decay == (1.0 if name.endswith(".weight") else 0.0)


@pytest.mark.parametrize("layer", [dl.BatchNorm, dl.LayerNorm, dl.InstanceNorm, dl.GroupNorm])
def test_the_factors_of_scale_and_offset(layer):
    groups = (2,) if layer is dl.GroupNorm else ()
    rates = {"scale_learn_rate_factor": 4.0, "offset_learn_rate_factor": 3.0}
    decays = {"scale_l2_factor": 0.5, "offset_l2_factor": 0.25}
    norm = layer(*groups, **rates, **decays, name="norm")
    factors = dl.Network([dl.Conv2D(3, 4), norm], SHAPE).factors
    for name, rate, decay in (("norm.gamma", 4, 0.5), ("norm.beta", 3, 0.25)):
        assert factors["learning_rate_factors"][name] == rate
        assert factors["l2_factors"][name] == decay
    scale = dl.Scale(scale_learn_rate_factor=5.0, scale_l2_factor=0.5, name="scale")
    factors = dl.Network([scale], SHAPE).factors
    assert factors["learning_rate_factors"] == {"scale.scale": 5}
    assert factors["l2_factors"] == {"scale.scale": 0.5}


def test_training_keeps_frozen_layers_and_applies_factors(world):
    """In `dl.train`, frozen layers keep their bytes, and a factor multiplies the learning rate."""
    images = (numbers("train", 48, *SHAPE, low=0) * 255).astype(np.uint8)
    store = dl.ArrayDatastore(images, np.arange(48) % 4)
    options = dl.TrainingOptions(epochs=1, batch_size=48, learning_rate=0.01, l2=0.0)

    def trained(*frozen, **factors):
        stack = [dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(4, **factors)]
        net = dl.Network(stack, SHAPE, seed=1).freeze(*frozen)
        before = net.parameters
        dl.train(net, store, options, world=world)
        return {name: net.parameters[name] - before[name] for name in before}

    plain, frozen = trained(), trained("conv1")
    assert not frozen["conv1.weight"].any() and plain["conv1.weight"].any()
    assert frozen["dense1.weight"].tobytes() == plain["dense1.weight"].tobytes()
    twice = trained(weight_learn_rate_factor=2.0)
    np.testing.assert_allclose(twice["dense1.weight"], 2 * plain["dense1.weight"], atol=1e-7)
    assert twice["dense1.bias"].tobytes() == plain["dense1.bias"].tobytes()


def test_a_resumed_run_may_not_freeze_other_layers():
    net = network()
    specs = json.loads(json.dumps(net.spec()))  # as in a checkpoint
    now = {"options": dl.TrainingOptions().as_dict(), "network": specs, "fingerprint": "f"}
    refuse_changes(now, {**now, "network": network().spec()})
    frozen = {**now, "network": net.freeze("conv1").spec()}
    with pytest.raises(dl.UserError, match="layer conv1 differs in trainable"):
        refuse_changes(now, frozen)


def test_freezing_an_unknown_layer_names_the_nearest():
    with pytest.raises(KeyError, match="no layer conv9: did you mean conv"):
        network().freeze("conv9")


def test_freezing_leaves_layers_of_other_networks_trainable(world):
    shared = layers()
    net = dl.Network(shared, SHAPE)
    other = dl.Network(net.layers, SHAPE).freeze("conv1")
    assert shared[0].trainable and net["conv1"].trainable and not other["conv1"].trainable
    assert all_images(world, net(batch_of(world)[0])).shape == (37, 4)
