"""Adam, RMSProp and clipping on the emulated GPU, against NumPy."""

import numpy as np
import pytest
from single_rank import numbers

from mpidl.backends import REFERENCE as reference
from mpidl.backends.gpu import array, launching, optimizer
from mpidl.backends.gpu.recorder import Recorder
from mpidl.training.optimizers import (
    AdamMoments,
    Clip,
    CorrectedAdamMoments,
    NesterovMomentum,
    Optimizer,
    Rate,
    Transform,
    WeightDecay,
)

LEARNABLES = [(5,), (4, 3, 3, 2), (), (7, 12), (1025,), (64,), (3, 2, 4, 4), (0,), (2050,)]
DECAYS = [0, 1e-4, 0.5, 1e-4, 0, 1e-4, 0.1, 0, 0]
FACTORS = [1, 2, 0.5, 1, 1, 20, 1, 1, 0.1]


def layout(value):
    """Weights as layers have them; (7, 12) goes with images (3, 2, 2)."""
    if value.ndim == 4 or value.shape == (7, 12):
        return array.filters(value, (3, 2, 2))
    return array.plain(value)


def draws(what, low=-1.0):
    return [numbers(f"{what} {i}", *s, low=low, dtype=np.float32) for i, s in enumerate(LEARNABLES)]


def states():
    return draws("weight"), draws("gradient"), draws("mean"), draws("square", low=0.0)


@pytest.mark.parametrize("device", [0, 1, 2], indirect=True)
@pytest.mark.parametrize("method", ["l2norm", "global-l2norm", "absolute-value"])
@pytest.mark.parametrize("small", [1 << 22, 100])
def test_clipping_is_numpys(device, monkeypatch, method, small):
    """But for the order in which squares are added up, which a rounding of the factor may show."""
    monkeypatch.setattr(optimizer, "SMALL", small)
    optimizer._blocks.cache_clear()
    weights, gradients, *_ = states()
    for threshold in (0.25, 10.0, 1e6):
        given = [layout(w) for w in weights], [layout(g) for g in gradients]
        found = optimizer.clip(*given, DECAYS, method, threshold)
        expected = reference.clip(weights, gradients, DECAYS, method, threshold)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.numpy(), other, rtol=2e-7)
            if method == "absolute-value" or threshold == 1e6:
                assert one.numpy().tobytes() == np.asarray(other).tobytes()
    optimizer._blocks.cache_clear()


@pytest.mark.parametrize("order", [1, 2])
def test_norms_are_the_same_bytes_in_every_schedule(emulated, order):
    weights, gradients, *_ = states()
    found = []
    for schedule in (0, order):
        with emulated(schedule):
            given = [layout(w) for w in weights], [layout(g) for g in gradients]
            clipped = optimizer.clip(*given, DECAYS, "global-l2norm", 0.5)
            found.append([a.numpy().tobytes() for a in clipped])
    assert found[0] == found[1]


def test_a_norm_that_is_no_number_shows(device):
    for bad in (np.nan, np.inf):
        gradients = [np.ones(3, np.float32), np.full(20, bad, np.float32)]
        zeros = [array.plain(np.zeros_like(g)) for g in gradients]
        given = [array.plain(g) for g in gradients]
        found = optimizer.clip(zeros, given, [0, 0], "l2norm", 1.0)
        assert np.isfinite(found[0].numpy()).all() and np.isnan(found[1].numpy()).all()


def test_no_parameters(device):
    assert (
        optimizer.optimizer_step("adam", [], [], [[], []], [0.01, 0.9, 0.1, 0.999, 0.001, 1e-8], [])
        == []
    )
    assert optimizer.clip([], [], [], "l2norm", 1.0) == [] and device.launched == []


def test_what_does_not_go_together_is_refused(device):
    weight = array.filters(np.zeros((2, 3, 4, 5), np.float32))
    plain = array.plain(np.zeros((2, 3, 4, 5), np.float32))
    with pytest.raises(ValueError, match="rmsprop: a state array lies in memory"):
        optimizer.optimizer_step(
            "rmsprop", [weight], [weight], [[plain]], [0.1, 0.9, 0.1, 1e-8], [0]
        )
    with pytest.raises(ValueError, match="clip: a gradient array lies in memory"):
        optimizer.clip([weight], [plain], [0], "l2norm", 1.0)


class Nothing(Transform):
    """Keeps a chain from being fused."""

    counts_steps = False

    def apply(self, updates, state_arrays, numbers):
        pass


CHAINS = {
    "adam, decay": lambda: (AdamMoments(), WeightDecay(0.01), Rate()),
    "adamw, fused": lambda: (CorrectedAdamMoments(epsilon=0.1), WeightDecay(0.1), Rate()),
    "nesterov, fused": lambda: (Rate(), NesterovMomentum(0.9)),
    "nesterov": lambda: (Rate(), Nothing(), NesterovMomentum(0.9)),
    "adamw": lambda: (CorrectedAdamMoments(epsilon=0.1), Nothing(), WeightDecay(0.1), Rate()),
}


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("parts", CHAINS)
def test_a_chain_is_recorded(device, parts, count):
    """Its numbers change from replay to replay, and its constants do not."""

    def chain():
        return Optimizer(0.1, Clip(2.0), *CHAINS[parts]())

    assert (chain()._fused is not None) == parts.endswith("fused")

    names = [f"layer{i}.weight" for i in range(len(LEARNABLES))]
    weights, gradients = (dict(zip(names, draws(w), strict=True)) for w in ("weight", "gradient"))
    expected, ours = weights, chain()
    for step in range(count):
        ours.learning_rate = 0.1 / (1 + step)
        expected = ours(expected, gradients)

    recorded, there = chain(), {name: layout(w) for name, w in weights.items()}
    slopes = {name: layout(g) for name, g in gradients.items()}
    recorded.prepare(there)
    recorder = Recorder(device)
    with launching.through(recorder):
        stepped = recorded.apply(there, slopes, recorded.numbers())
        for name, old in there.items():
            recorder.carry(stepped[name], old)
        result = launching.scalar("result", 0.0, np.float64)  # a program has at least one
    made = recorder.finish({"result": result}, graphs=False)
    for step in range(count):
        recorded.learning_rate = 0.1 / (1 + step)
        made.results(made.run(**recorded.advance(), result=1.0))
    device.synchronize()
    for name, weight in there.items():
        np.testing.assert_allclose(weight.numpy(), expected[name], rtol=2e-6, atol=2e-6)
