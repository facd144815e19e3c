"""Compare SGDM with float64 loops and PyTorch: momentum, L2, factors and state."""

import numpy as np
import pytest
from parameter_tables import SHAPES, distance, same_bytes, tables

from mpidl.errors import UserError
from mpidl.training.optimizers import SGDM, Momentum, NesterovMomentum, of_options
from mpidl.training.options.training_options import TrainingOptions


def loop(rates, momentum, l2, torch_form=False, nesterov=False):
    """Compute the steps in float64, element by element."""
    weights = {name: array.astype(np.float64) for name, array in tables(0).items()}
    for name, weight in weights.items():
        velocity = np.zeros_like(weight)
        for step, rate in enumerate(rates):
            gradient = tables(step + 1)[name].astype(np.float64)
            for place in np.ndindex(weight.shape):
                g = gradient[place] + (l2 * weight[place] if name.endswith(".weight") else 0)
                if torch_form:
                    velocity[place] = momentum * velocity[place] + g
                    step = g + momentum * velocity[place] if nesterov else velocity[place]
                    weight[place] -= rate * step
                else:
                    old = velocity[place]
                    velocity[place] = momentum * velocity[place] - rate * g
                    weight[place] += velocity[place]
                    if nesterov:  # Sutskever's form: move to where the next gradient is computed
                        weight[place] += momentum * (velocity[place] - old)
    return weights


def train(rates, momentum, l2, dtype=np.float32, **options):
    sgdm, weights = SGDM(momentum=momentum, l2=l2, **options), tables(0, dtype)
    for step, rate in enumerate(rates):
        sgdm.learning_rate = rate
        weights = sgdm(weights, tables(step + 1, dtype))
    return weights


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("l2", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_are_those_of_a_float64_loop(momentum, l2, nesterov):
    rates = [0.1, 0.1, 0.01, 0.01]
    weights = train(rates, momentum, l2, nesterov=nesterov)
    assert all(array.dtype == np.float32 for array in weights.values())
    assert distance(weights, loop(rates, momentum, l2, nesterov=nesterov)) < 1e-6
    other = distance(weights, loop(rates, momentum, l2, nesterov=not nesterov))
    assert other > 1e-2 if momentum else other < 1e-6


@pytest.mark.parametrize("nesterov", [False, True])
def test_pytorch_takes_the_same_steps_at_one_rate(nesterov):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    weights = [torch.tensor(a) for a in tables(0, np.float64).values()]
    other = torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=nesterov)
    for step in range(1, 7):
        for w, g in zip(weights, tables(step, np.float64).values(), strict=True):
            w.grad = torch.tensor(g)
        other.step()
    ours = train([0.1] * 6, 0.9, 0.0, np.float64, nesterov=nesterov)
    expected = dict(zip(SHAPES, (w.numpy() for w in weights), strict=True))
    assert distance(ours, expected) < 1e-12


@pytest.mark.parametrize("nesterov", [True, "on"])
def test_nesterov_is_on_or_off(nesterov):
    sgdm, options = SGDM(nesterov=nesterov), TrainingOptions(nesterov=nesterov)
    assert type(sgdm.transforms[-1]) is NesterovMomentum and options.nesterov == "on"
    assert type(of_options(options).transforms[-1]) is NesterovMomentum
    assert type(of_options(TrainingOptions()).transforms[-1]) is Momentum
    with pytest.raises(UserError, match="nesterov must be on or off, found 'yes'"):
        SGDM(nesterov="yes")


def test_the_form_of_pytorch_differs_when_the_rate_changes():
    constant, changed = [0.1] * 4, [0.1, 0.1, 0.01, 0.01]
    assert distance(train(constant, 0.9, 0.0), loop(constant, 0.9, 0.0, torch_form=True)) < 1e-6
    assert distance(train(changed, 0.9, 0.0), loop(changed, 0.9, 0.0, torch_form=True)) > 1e-2
    form = {"torch_form": True, "nesterov": True}
    assert (
        distance(train(constant, 0.9, 0.0, nesterov=True), loop(constant, 0.9, 0.0, **form)) < 1e-6
    )
    assert distance(train(changed, 0.9, 0.0, nesterov=True), loop(changed, 0.9, 0.0, **form)) > 1e-2


def test_arguments_are_not_changed():
    weights, gradients = tables(0), tables(1)
    sgdm = SGDM(l2=0.1)
    stepped = sgdm(sgdm(weights, gradients), gradients)
    assert distance(weights, tables(0)) == 0 and distance(gradients, tables(1)) == 0
    stepped["conv1.bias"] += 1  # must not change the velocity
    assert np.abs(sgdm.velocity["conv1.bias"]).max() < 1


def test_decays_have_factors():
    zero = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    stepped = SGDM(1.0, l2=0.5, l2_factors={"conv1.bias": 0.5})(tables(0), zero)
    start = tables(0)
    assert np.allclose(stepped["conv1.weight"], 0.5 * start["conv1.weight"])
    assert np.allclose(stepped["conv1.bias"], 0.75 * start["conv1.bias"])
    assert np.array_equal(stepped["batchnorm1.gamma"], start["batchnorm1.gamma"])
    with pytest.raises(ValueError, match="did you mean conv1.bias"):
        SGDM(l2_factors={"conv1.bia": 1.0})(tables(0), zero)


def test_learning_rates_have_factors():
    """A learning-rate factor multiplies the whole step, including momentum and L2."""
    factors = {"conv1.weight": 20.0, "conv1.bias": 0.5}
    sgdm = SGDM(0.01, l2=0.1, learning_rate_factors=factors)
    stepped = tables(0)
    for step in (1, 2, 3):
        stepped = sgdm(stepped, tables(step))
    for name in SHAPES:
        plain, weights = SGDM(0.01 * factors.get(name, 1.0), l2=0.1), tables(0)
        for step in (1, 2, 3):
            weights = plain(weights, tables(step))
        np.testing.assert_allclose(stepped[name], weights[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="learning_rate_factors: unknown parameter conv1.bia"):
        SGDM(learning_rate_factors={"conv1.bia": 1.0})(tables(0), tables(1))


def test_a_factor_of_one_changes_no_byte():
    ones = SGDM(0.0123, l2=0.1, learning_rate_factors=dict.fromkeys(SHAPES, 1.0))
    plain, weights, expected = SGDM(0.0123, l2=0.1), tables(0), tables(0)
    for step in (1, 2):
        weights, expected = ones(weights, tables(step)), plain(expected, tables(step))
    assert same_bytes(weights, expected)


def test_a_parameter_with_factor_0_needs_no_gradient():
    sgdm, weights = SGDM(l2=0.1, learning_rate_factors={"conv1.bias": 0.0}), tables(0)
    gradients = {name: g for name, g in tables(1).items() if name != "conv1.bias"}
    for _ in range(2):
        stepped = sgdm(weights, gradients)
        assert stepped["conv1.bias"] is weights["conv1.bias"] and list(stepped) == list(SHAPES)
        weights = stepped
    assert list(sgdm.state()) == ["velocity.conv1.weight", "velocity.batchnorm1.gamma"]
    resumed = SGDM(learning_rate_factors={"conv1.bias": 0.0})
    resumed.load_state(sgdm.state())
    resumed(weights, gradients)
    with pytest.raises(ValueError, match="missing conv1.bias .*net.factors to the optimizer"):
        SGDM()(weights, gradients)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_restored_state_gives_the_same_bytes(nesterov):
    straight, weights = SGDM(nesterov=nesterov), tables(0)
    for step in (1, 2, 3):
        weights = straight(weights, tables(step))
    stopped, resumed_weights = SGDM(nesterov=nesterov), tables(0)
    for step in (1, 2):
        resumed_weights = stopped(resumed_weights, tables(step))
    resumed = SGDM(nesterov=nesterov)
    resumed.load_state(stopped.state())
    assert same_bytes(resumed(resumed_weights, tables(3)), weights)
    forgetful = SGDM(nesterov=nesterov)(stopped(tables(0), tables(1)), tables(3))
    assert distance(forgetful, weights) > 1e-3


def test_a_new_optimizer_has_no_state():
    assert SGDM().state() == {}
    SGDM().load_state({})
    with pytest.raises(ValueError, match="unknown array conv1.weight; expected arrays of velocity"):
        SGDM().load_state(tables(0))


def test_names_and_shapes_must_match():
    weights = tables(0)
    with pytest.raises(ValueError, match="missing conv1.bias"):
        SGDM()(weights, {n: a for n, a in tables(1).items() if n != "conv1.bias"})
    with pytest.raises(ValueError, match="unknown dense1.bias"):
        SGDM()(weights, {**tables(1), "dense1.bias": weights["conv1.bias"]})
    with pytest.raises(ValueError, match=r"conv1.bias: expected shape \(3,\), found \(4,\)"):
        SGDM()(weights, {**tables(1), "conv1.bias": np.zeros(4, np.float32)})
    sgdm = SGDM()
    sgdm.load_state({"velocity.dense9.bias": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match="velocity arrays do"):
        sgdm(weights, tables(1))


def test_wrong_options_are_refused():
    with pytest.raises(UserError, match="learning_rate must be positive, found 0"):
        SGDM(learning_rate=0)
    with pytest.raises(UserError, match="momentum"):
        SGDM(momentum=1.0)


def test_each_precision_has_its_own_arithmetic():
    double = {name: array.astype(np.float64) for name, array in tables(0).items()}
    gradients = {name: array.astype(np.float64) for name, array in tables(1).items()}
    sgdm = SGDM(0.1, l2=0.3)
    for _ in range(3):
        double = sgdm(double, gradients)
    weights = tables(0)
    for name, gradient in gradients.items():
        w, v = weights[name].astype(np.float64), 0.0
        for _ in range(3):
            v = 0.9 * v - 0.1 * (gradient + (0.3 * w if name.endswith(".weight") else 0))
            w = w + v
        np.testing.assert_allclose(double[name], w, rtol=1e-13)
        assert double[name].dtype == np.float64


def test_the_state_is_a_copy():
    sgdm = SGDM()
    weights = sgdm(tables(0), tables(1))
    state = sgdm.state()
    before = {name: array.copy() for name, array in state.items()}
    sgdm(weights, tables(2))
    assert all(np.array_equal(state[name], before[name]) for name in state)
