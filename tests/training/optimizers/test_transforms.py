"""Test gradient transforms individually, and in chains with and without fused kernels."""

import numpy as np
import pytest
from short_training import pictures, small

import mpidl as dl
from mpidl.errors import UserError
from mpidl.training.optimizers import (
    AdamMoments,
    Clip,
    CorrectedAdamMoments,
    LambTrustRatio,
    LarsTrustRatio,
    Momentum,
    NesterovMomentum,
    Optimizer,
    Rate,
    RMSPropMoment,
    Transform,
    WeightDecay,
)

SHAPES = {"conv1.weight": (3, 1, 2, 2), "conv1.bias": (3,), "dense1.weight": (5, 7)}


def arrays(seed, dtype=np.float32):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def norm(array):
    return np.linalg.norm(array.astype(np.float64))


def test_each_transform_works_by_itself():
    weights, gradients = arrays(0), arrays(1)
    decayed = WeightDecay(0.1)(weights, gradients)
    for name, gradient in gradients.items():
        factor = 0.1 if name.endswith("weight") else 0.0
        np.testing.assert_allclose(decayed[name], gradient + factor * weights[name], rtol=1e-6)
    clipped = Clip(0.5)(weights, gradients)
    assert {name: pytest.approx(0.5, rel=1e-6) for name in clipped} == {
        name: norm(array) for name, array in clipped.items()
    }
    limited = Clip(0.3, "absolute-value")(weights, gradients)
    assert all(np.array_equal(limited[n], g.clip(-0.3, 0.3)) for n, g in gradients.items())
    steps = Rate()(weights, gradients)
    assert all(np.array_equal(steps[n], -g) for n, g in gradients.items())
    first = AdamMoments(0.9, 0.99, 1e-12)(weights, gradients)  # signs of gradients
    assert all(np.allclose(first[n], np.sign(g), atol=1e-5) for n, g in gradients.items())
    first = RMSPropMoment(0.75, 1e-12)(weights, gradients)
    assert all(np.allclose(first[n], 2 * np.sign(g), atol=1e-5) for n, g in gradients.items())
    assert all(np.array_equal(Momentum()(weights, gradients)[n], g) for n, g in gradients.items())
    steps = NesterovMomentum(0.5)(weights, gradients)
    assert all(np.array_equal(steps[n], 0.5 * g + g) for n, g in gradients.items())


def stepped(optimizer, count=5, dtype=np.float32):
    weights = arrays(0, dtype)
    for step in range(count):
        optimizer.learning_rate = 0.1 / (1 + step)
        weights = optimizer(weights, arrays(step + 1, dtype))
    return weights


class Nothing(Transform):
    """A transform without effect. Chains that contain it have no fused kernel."""

    counts_steps = False

    def apply(self, updates, state_arrays, numbers):
        pass


PAIRS = {
    "sgdm": lambda: (Rate(), Momentum(0.9)),
    "nesterov": lambda: (Rate(), NesterovMomentum(0.9)),
    "adam": lambda: (AdamMoments(), Rate()),
    "adamw": lambda: (CorrectedAdamMoments(epsilon=0.1), WeightDecay(0.1), Rate()),
    "rmsprop": lambda: (RMSPropMoment(), Rate()),
    "lamb": lambda: (CorrectedAdamMoments(), WeightDecay(0.1), LambTrustRatio(), Rate()),
}


def test_trust_ratios_are_those_of_the_norms():
    weights, gradients = arrays(0), arrays(1)
    lars, lamb = LarsTrustRatio(0.02), LambTrustRatio(exclude="none")
    for name, g in gradients.items():
        ratio = norm(weights[name]) / norm(g)
        scaled = g * (0.02 * ratio if name.endswith("weight") else 1.0)
        np.testing.assert_allclose(lars(weights, gradients)[name], scaled, rtol=1e-6)
        np.testing.assert_allclose(lamb(weights, gradients)[name], g * ratio, rtol=1e-6)
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    for transform in (lars, lamb):  # zero weights, then zero gradients
        assert all(np.array_equal(a, gradients[n]) for n, a in transform(zeros, gradients).items())
        assert all(not a.any() for a in transform(weights, zeros).values())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_chain_takes_the_steps_of_its_kernel(pair, dtype):
    head, factors = (WeightDecay(0.01), Clip(2.0)), {"conv1.bias": 0.5}
    fused = Optimizer(0.1, *head, *PAIRS[pair](), learning_rate_factors=factors)
    first, *tail = PAIRS[pair]()
    chain = Optimizer(0.1, *head, first, Nothing(), *tail, learning_rate_factors=factors)
    assert fused._fused is not None and chain._fused is None
    weights, expected = stepped(fused, dtype=dtype), stepped(chain, dtype=dtype)
    tolerance = 1e-6 if dtype == np.float32 else 1e-14
    for name, weight in weights.items():
        np.testing.assert_allclose(expected[name], weight, rtol=tolerance, atol=tolerance)
    assert set(fused.state()) == set(chain.state())


@pytest.mark.parametrize("momentum", [Momentum, NesterovMomentum])
def test_momentum_before_the_rate_is_the_form_of_pytorch(momentum):
    """The chain computes v <- 0.9 v + g, w <- w - rate * v, even if the rate changes."""
    nesterov = momentum is NesterovMomentum
    weights, velocity = arrays(0, np.float64), dict.fromkeys(SHAPES, 0.0)
    for step in range(5):
        for name, gradient in arrays(step + 1, np.float64).items():
            velocity[name] = 0.9 * velocity[name] + gradient
            direction = gradient + 0.9 * velocity[name] if nesterov else velocity[name]
            weights[name] = weights[name] - 0.1 / (1 + step) * direction
    for name, weight in stepped(Optimizer(0.1, momentum(0.9), Rate())).items():
        np.testing.assert_allclose(weight, weights[name], rtol=1e-5, atol=1e-6)


def test_a_decay_after_the_moments_is_decoupled():
    """As in AdamW, the decay is added to the direction, not to the gradient."""
    chain = Optimizer(0.1, AdamMoments(), WeightDecay(0.01), Rate())
    plain = Optimizer(0.1, AdamMoments(), Rate())
    weights, gradients = arrays(0), arrays(1)
    decayed, ours = chain(weights, gradients), plain(weights, gradients)
    for name, weight in weights.items():
        factor = 0.01 if name.endswith("weight") else 0.0
        np.testing.assert_allclose(
            decayed[name], ours[name] - np.float32(0.1 * factor) * weight, rtol=1e-5, atol=1e-6
        )


def test_epsilon_is_added_before_or_after_the_correction():
    """The two places to add epsilon give different results only if epsilon is large."""
    weights, gradients = arrays(0, np.float64), arrays(1, np.float64)
    corrected = CorrectedAdamMoments(epsilon=0.1)(weights, gradients)  # the first step
    for name, g in gradients.items():
        np.testing.assert_allclose(corrected[name], g / (np.abs(g) + 0.1), rtol=1e-12)
        other = AdamMoments(epsilon=0.1)(weights, gradients)[name]
        assert np.abs(other - corrected[name]).max() > 0.1
        small = AdamMoments(epsilon=1e-15)(weights, gradients)[name]
        ours = CorrectedAdamMoments(epsilon=1e-15)(weights, gradients)[name]
        np.testing.assert_allclose(ours, small, rtol=1e-10)


def test_a_chain_may_have_a_penalty_and_a_decoupled_decay():
    """The penalty is added to the gradient, and the decoupled decay to the step.

    This holds with and without a fused kernel.
    """
    tail = CorrectedAdamMoments(), WeightDecay(0.3), Rate()
    fused = stepped(Optimizer(0.1, WeightDecay(0.2), *tail))
    chain = stepped(Optimizer(0.1, WeightDecay(0.2), tail[0], Nothing(), *tail[1:]))
    unpenalized = stepped(Optimizer(0.1, *tail))
    for name, weight in fused.items():
        np.testing.assert_allclose(chain[name], weight, rtol=1e-6, atol=1e-6)
        assert (np.abs(unpenalized[name] - weight).max() > 1e-3) == name.endswith("weight")


@pytest.mark.slow_on_ranks
def test_a_chain_trains_and_resumes(world, tmp_path, without_plots):
    def chain():
        return Optimizer(0.05, Clip(1.0), Momentum(0.9), Rate())

    def train(optimizer, **arguments):
        net = small()
        options = dl.TrainingOptions(epochs=2, batch_size=40, verbose_every=0)
        dl.train(net, pictures(100), options, world=world, optimizer=optimizer, **arguments)
        return dl.weights_sha256(net)

    class StopAtFour:
        def step(self, trainer):
            if trainer.position.iteration == 4:
                trainer.stop()

    out = world.broadcast(str(tmp_path))
    train(chain(), out=out, hooks=[StopAtFour()])
    assert train(chain(), resume=out) == train(chain())


class Scale(Transform):
    """A transform with the number "scale". A chain may contain several such transforms."""

    def __init__(self, factor):
        self.factor = factor

    def numbers(self, learning_rate, step):
        return {"scale": self.factor * step}

    def apply(self, updates, state_arrays, numbers):
        updates.add_decays()
        updates.arrays = [np.float32(numbers["scale"]) * array for array in updates.arrays]


@pytest.mark.parametrize("tail", [(Rate(),), (Rate(), Momentum(0.0))])
def test_transforms_may_have_numbers_of_the_same_name(tail):
    chain = Optimizer(0.1, Scale(2.0), Scale(3.0), *tail)
    weights, gradients = arrays(0), arrays(1)
    for step in (1, 2):
        stepped_weights = chain(weights, gradients)
        for name, weight in weights.items():
            expected = weight - np.float32(0.1 * 6 * step * step) * gradients[name]
            np.testing.assert_allclose(stepped_weights[name], expected, rtol=1e-5, atol=1e-6)
    assert chain.state()["steps"] == 2


def test_factors_of_every_decay_are_checked():
    chain = Optimizer(0.1, WeightDecay(0.1, {"bogus": 1.0}), WeightDecay(0.1), Rate())
    with pytest.raises(ValueError, match="l2_factors: unknown parameter bogus"):
        chain(arrays(0), arrays(1))


def test_wrong_arguments_are_refused():
    with pytest.raises(UserError, match="learning_rate must be a number, positive, found None"):
        Optimizer(None, Rate())
    with pytest.raises(UserError, match="learning_rate must be positive"):
        Optimizer(-1.0, Rate())
    with pytest.raises(TypeError, match="expected transforms such as"):
        Optimizer(0.1, Rate)


def test_transforms_must_not_share_the_name_of_a_table():
    with pytest.raises(ValueError, match="two transforms have a table of the same name"):
        Optimizer(0.1, Momentum(), Momentum(0.5), Rate())


def test_a_transform_must_define_apply():
    with pytest.raises(TypeError, match="Transform does not define apply"):
        Transform()(arrays(0), arrays(1))
