"""Augmented and normalized images on the emulated GPU: those that the CPU is given."""

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.data.loading import device_queue
from mpidl.training import trainer
from mpidl.training.files.model_file import weights_sha256

WHOLE = {"reflect_x": True, "reflect_y": True, "translate_x": 2, "crop": (8, 9), "fill": 9}
WARPED = WHOLE | {"rotation": 20, "scale": (0.8, 1.2)}


def pictures(count, kind=np.uint8):
    images = numbers("gpu input", count, 3, 10, 11, low=0, high=256).astype(np.uint8)
    return dl.ArrayDatastore(images.astype(kind), np.arange(count) % 3)


def plan(ranges, name, store):
    return {
        "augmenter": None if ranges is None else dl.Augmenter(**ranges),
        "normalization": dl.data.normalization(name, store),
    }


CASES = [
    (WHOLE, "zscore", np.uint8),
    (WHOLE, "rescale-zero-one", np.float32),
    (WARPED, "zerocenter-element", np.uint8),
    ({"translate_y": 3}, "none", np.uint8),
    (None, "rescale-symmetric", np.float32),
]


@pytest.mark.parametrize("ranges, name, kind", CASES)
def test_a_queue_uploads_what_the_host_would_make(world, ranges, name, kind):
    store = pictures(40, kind)
    how = plan(ranges, name, store)
    ours = dl.MinibatchQueue(store, 24, 3, world, **how)
    host = dl.MinibatchQueue(store, 24, 3, **how)
    for (images, labels), (wanted, known) in zip(ours.epoch(2), host.epoch(2), strict=True):
        assert images.lanes.numpy().tobytes() == wanted.lanes.tobytes()
        assert np.array_equal(labels.lanes.numpy(), known.lanes)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("ranges, name, kind", CASES)
def test_a_recorded_step_is_told_of_each_mini_batch(
    world, ranges, name, kind, resident, monkeypatch
):
    """Training on both: the weights agree as far as sums in another order let them."""
    monkeypatch.setattr(device_queue, "RESIDENT", 0.5 if resident else 0.0)
    store = pictures(40, kind)
    options = {
        "epochs": 2,
        "batch_size": 24,
        "verbose_every": 0,
        "learning_rate": 1e-3,
        "normalization": name,
        "augmenter": None if ranges is None else dl.Augmenter(**ranges),
    }
    found = {}
    for where in ("gpu", "cpu"):
        held = world if where == "gpu" else dl.World(threads=1)
        shape = (3, *(ranges or {}).get("crop", (10, 11)))
        net = dl.Network([dl.Conv2D(3, 4), dl.Dense(3)], shape)
        trainer.train(net, store, dl.TrainingOptions(**options), world=held)
        found[where] = net
    for name, expected in found["cpu"].parameters.items():
        error = abs(found["gpu"].parameters[name] - expected).max()
        assert error < 1e-4 * max(abs(expected).max(), 1e-3), name


def test_negative_control_without_augmentation_the_weights_are_others(world):
    store, hashes = pictures(40), set()
    for flip in ("none", "x"):
        net = dl.Network([dl.Conv2D(3, 4), dl.Dense(3)], (3, 10, 11))
        options = dl.TrainingOptions(epochs=1, batch_size=24, verbose_every=0, flip=flip)
        trainer.train(net, store, options, world=world)
        hashes.add(weights_sha256(net))
    assert len(hashes) == 2
