"""Test optimizer steps and gradient clipping on the emulated GPU: memory, chunks, recording.

tests/backends/test_conformance.py compares the numbers with NumPy.
"""

import contextlib

import numpy as np
import pytest
from conformance import arguments, flat, results, share
from single_rank import numbers
from test_conformance import BY_NAME, check_on_gpu
from training_cases import DECAYS, FACTORS, LEARNABLES

from mpidl.backends import REFERENCE
from mpidl.backends.gpu import array, launching, optimizer
from mpidl.backends.gpu.array import Array
from mpidl.backends.gpu.backend import GPU
from mpidl.backends.gpu.recorder import Recorder
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
    Transform,
    WeightDecay,
)

SGDM = BY_NAME["optimizer_step, sgdm"]


def layout(value):
    """Upload weights in the layout of layers. Weights (7, 12) read images (3, 2, 2)."""
    if value.ndim == 4 or value.shape == (7, 12):
        return array.filters(value, (3, 2, 2))
    return array.plain(value)


def draws(name):
    return [numbers(f"{name} {i}", *v.shape, dtype=np.float32) for i, v in enumerate(LEARNABLES)]


def bytes_of(arrays):
    return [(a.numpy() if isinstance(a, Array) else np.asarray(a)).tobytes() for a in arrays]


def moved(value, offset):
    """Return a copy of an Array that starts `offset` floats after the start of its memory."""
    memory = launching.empty((value.size + offset,))
    launching.upload(memory, np.pad(launching.download(value).ravel(), (offset, 0)))
    value.buffer, value.offset = memory.buffer, 4 * offset
    return value


@pytest.mark.parametrize("shifts", [(0, 0, 0), (1, 1, 1), (1, 0, 0), (0, 2, 0), (0, 0, 3)])
def test_sgdm_step_matches_numpy_aligned_or_not(device, shifts):
    values = arguments(SGDM, GPU, share(1))
    for name, shift in zip(("weights", "gradients", "state 0"), shifts, strict=True):
        values[name] = [moved(value, shift) for value in values[name]]
    weights = values["weights"]
    before, (new, velocities) = bytes_of(weights), SGDM.call(GPU, values)
    assert device.launched == ["optimizer_step"]
    for w, old in zip(new, weights, strict=True):
        assert (w.shape, w.dims, w.order) == (old.shape, old.dims, old.order)
    assert bytes_of(flat([new, velocities])) == bytes_of(results(SGDM, REFERENCE))
    assert bytes_of(weights) == before


def test_new_weights_have_the_same_offsets_in_every_step(device):
    """New weights have fixed offsets in one buffer, so this buffer can replace the old weights."""
    weights, velocities = draws("weight"), draws("velocity")
    device_weights, device_velocities = ([layout(v) for v in a] for a in (weights, velocities))
    places, total = array.places(tuple(w.size for w in weights))
    assert all(place % 64 == 0 for place in places) and total % 64 == 0
    for step in range(3):
        gradients = draws(f"gradient {step}")
        options = [0.1 / (step + 1), 0.9], DECAYS, FACTORS
        weights = REFERENCE.optimizer_step("sgdm", weights, gradients, [velocities], *options)
        gradients = [layout(g) for g in gradients]
        device_weights = optimizer.optimizer_step(
            "sgdm", device_weights, gradients, [device_velocities], *options
        )
        assert [w.offset for w in device_weights] == [4 * place for place in places]
        assert len({id(w.buffer) for w in device_weights}) == 1
    assert bytes_of([*device_weights, *device_velocities]) == bytes_of([*weights, *velocities])


@pytest.mark.parametrize("device", [0, 1, 2], indirect=True)
def test_new_weights_can_overwrite_the_old_ones(device, monkeypatch):
    values = arguments(SGDM, GPU, share(1))
    places, total = array.places(tuple(w.size for w in values["weights"]))
    memory, floats = launching.empty((total,)), np.zeros(total, np.float32)
    for w, place in zip(values["weights"], places, strict=True):
        floats[place : place + w.size] = launching.download(w).ravel()
        w.buffer, w.offset = memory.buffer, 4 * place
    launching.upload(memory, floats)
    monkeypatch.setattr(array, "empty", lambda shape: memory)
    assert bytes_of(flat(SGDM.call(GPU, values))) == bytes_of(results(SGDM, REFERENCE))


@contextlib.contextmanager
def small_up_to(size):
    """Use small chunks for up to `size` floats in total, and large chunks for more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "SMALL", size)
        optimizer._blocks.cache_clear()
        yield
    optimizer._blocks.cache_clear()


@pytest.mark.parametrize("small", [1 << 22, 100])
def test_large_arrays_are_stepped_in_larger_parts(device, small):
    weight, gradient, velocity = (numbers(name, 11, 999, dtype=np.float32) for name in "wgv")
    on_device = array.plain(velocity)
    options = [0.5, 0.25], [1e-3]
    with small_up_to(small):
        new = optimizer.optimizer_step(
            "sgdm", [array.plain(weight)], [array.plain(gradient)], [[on_device]], *options
        )
    expected = REFERENCE.optimizer_step("sgdm", [weight], [gradient], [[velocity]], *options)
    assert bytes_of([*new, on_device]) == bytes_of([*expected, velocity])


@pytest.mark.parametrize("method", ["l2norm", "global-l2norm", "absolute-value"])
def test_clipping_of_larger_parts_matches_numpy(device, method):
    with small_up_to(100):
        check_on_gpu(device, *(f"clip, {method}, {threshold}" for threshold in (0.25, 10.0, 1e6)))


def test_norms_are_the_same_bytes_in_every_schedule(emulated):
    """Test the norm of all parameters together. test_conformance.py tests the other norms."""
    case, clipped = BY_NAME["clip, global-l2norm, 0.25"], []
    for schedule in (0, 1, 2):
        with emulated(schedule):
            clipped.append(bytes_of(results(case, GPU)))
    assert clipped[0] == clipped[1] == clipped[2]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_norm_that_is_not_finite_gives_nan(device, bad):
    host = [np.ones(3, np.float32), np.full(20, bad, np.float32)]
    weights, gradients = [array.plain(np.zeros_like(g)) for g in host], map(array.plain, host)
    finite, spoiled = optimizer.clip(weights, list(gradients), [0, 0], "l2norm", 1.0)
    assert np.isfinite(finite.numpy()).all() and np.isnan(spoiled.numpy()).all()


def test_without_parameters_nothing_is_launched(device):
    adam = [0.01, 0.9, 0.1, 0.999, 0.001, 1e-8]
    assert optimizer.optimizer_step("sgdm", [], [], [[]], [0.1, 0.9], []) == []
    assert optimizer.optimizer_step("adam", [], [], [[], []], adam, []) == []
    assert optimizer.clip([], [], [], "l2norm", 1.0) == [] and device.launched == []


def test_other_layouts_and_types_are_refused(device):
    weight = array.filters(np.zeros((2, 3, 4, 5), np.float32))
    plain = array.plain(np.zeros((2, 3, 4, 5), np.float32))
    double = Array(weight.buffer, np.float64, weight.shape, weight.dims, weight.order)
    sgdm, rmsprop = [0.1, 0.9], [0.1, 0.9, 0.1, 1e-8]
    for name, gradient, state, constants, error, message in (
        ("sgdm", plain, weight, sgdm, ValueError, "gradient array has the memory layout"),
        ("sgdm", weight, double, sgdm, TypeError, "float32"),
        (
            "rmsprop",
            weight,
            plain,
            rmsprop,
            ValueError,
            "rmsprop: a state array has the memory layout",
        ),
    ):
        with pytest.raises(error, match=message):
            optimizer.optimizer_step(name, [weight], [gradient], [[state]], constants, [0])
    with pytest.raises(ValueError, match="clip: a gradient array has the memory layout"):
        optimizer.clip([weight], [plain], [0], "l2norm", 1.0)


class Identity(Transform):
    """A transform that changes nothing, but prevents the fusion of a chain of transforms."""

    counts_steps = False

    def apply(self, updates, state_arrays, numbers):
        pass


CHAINS = {
    "adam, decay": lambda: (AdamMoments(), WeightDecay(0.01), Rate()),
    "adamw, fused": lambda: (CorrectedAdamMoments(epsilon=0.1), WeightDecay(0.1), Rate()),
    "nesterov, fused": lambda: (Rate(), NesterovMomentum(0.9)),
    "lars, fused": lambda: (WeightDecay(0.1), LarsTrustRatio(0.1), Rate(), Momentum(0.9)),
    "lamb, fused": lambda: (
        *(CorrectedAdamMoments(epsilon=0.1), WeightDecay(0.1), LambTrustRatio(), Rate()),
    ),
    "nesterov": lambda: (Rate(), Identity(), NesterovMomentum(0.9)),
    "adamw": lambda: (CorrectedAdamMoments(epsilon=0.1), Identity(), WeightDecay(0.1), Rate()),
}


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name", CHAINS)
def test_a_recorded_chain_replays_with_the_numbers_of_each_step(device, name, count):
    def chain():
        return Optimizer(0.1, Clip(2.0), *CHAINS[name]())

    assert (chain()._fused is not None) == name.endswith("fused")

    keys = [f"layer{i}.weight" for i in range(len(LEARNABLES))]
    weights, gradients = (dict(zip(keys, draws(w), strict=True)) for w in ("weight", "gradient"))
    expected, host_chain = weights, chain()
    for step in range(count):
        host_chain.learning_rate = 0.1 / (1 + step)
        expected = host_chain(expected, gradients)

    recorded, device_weights = chain(), {key: layout(w) for key, w in weights.items()}
    device_gradients = {key: layout(g) for key, g in gradients.items()}
    recorded.prepare(device_weights)
    recorder = Recorder(device)
    with launching.through(recorder):
        stepped = recorded.apply(device_weights, device_gradients, recorded.numbers())
        for key, old in device_weights.items():
            recorder.store(stepped[key], old)
        result = launching.scalar("result", 0.0, np.float64)  # a program needs a result
    program = recorder.finish({"result": result}, graphs=False)
    for step in range(count):
        recorded.learning_rate = 0.1 / (1 + step)
        program.results(program.run(**recorded.advance(), result=1.0))
    device.synchronize()
    for key, weight in device_weights.items():
        np.testing.assert_allclose(weight.numpy(), expected[key], rtol=2e-6, atol=2e-6)
