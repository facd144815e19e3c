"""Check that augmented and normalized images on the emulated GPU equal those on the CPU."""

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.data.loading import device_queue
from mpidl.training.files.model_file import weights_sha256

MOVED = {"reflect_x": True, "reflect_y": True, "translate_x": 2, "crop": (8, 9), "fill": 9}
WARPED = MOVED | {"rotation": 20, "scale": (0.8, 1.2)}


def pictures(count, kind=np.uint8):
    images = numbers("gpu input", count, 3, 10, 11, low=0, high=256).astype(np.uint8)
    return dl.ArrayDatastore(images.astype(kind), np.arange(count) % 3)


def queue_options(ranges, name, store):
    """Return the options of a queue: augmenter and normalization."""
    return {
        "augmenter": None if ranges is None else dl.Augmenter(**ranges),
        "normalization": dl.data.normalization(name, store),
    }


CASES = [
    (MOVED, "zscore", np.uint8),
    (MOVED, "rescale-zero-one", np.float32),
    (WARPED, "zerocenter-element", np.uint8),
    ({"translate_y": 3}, "none", np.uint8),
    (None, "rescale-symmetric", np.float32),
]


@pytest.mark.parametrize("ranges, name, kind", CASES)
def test_a_queue_uploads_the_images_of_the_host(world, ranges, name, kind):
    store = pictures(40, kind)
    options = queue_options(ranges, name, store)
    queue = dl.MinibatchQueue(store, 24, 3, world, **options)
    host_queue = dl.MinibatchQueue(store, 24, 3, **options)
    for (x, y), (host_x, host_y) in zip(queue.epoch(2), host_queue.epoch(2), strict=True):
        assert x.lanes.numpy().tobytes() == host_x.lanes.tobytes()
        assert np.array_equal(y.lanes.numpy(), host_y.lanes)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("ranges, name, kind", CASES)
def test_recorded_steps_learn_from_the_images_of_the_host(
    world, ranges, name, kind, resident, monkeypatch
):
    """Weights agree with the CPU up to rounding, because the GPU adds in another order."""
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
    nets = []
    for rank in (world, dl.World(threads=1)):
        shape = (3, *(ranges or {}).get("crop", (10, 11)))
        net = dl.Network([dl.Conv2D(3, 4), dl.Dense(3)], shape)
        dl.train(net, store, dl.TrainingOptions(**options), world=rank)
        nets.append(net)
    for name, expected in nets[1].parameters.items():
        error = abs(nets[0].parameters[name] - expected).max()
        assert error < 1e-4 * max(abs(expected).max(), 1e-3), name


def test_negative_control_augmentation_changes_the_weights(world):
    store, hashes = pictures(40), set()
    for flip in ("none", "x"):
        net = dl.Network([dl.Conv2D(3, 4), dl.Dense(3)], (3, 10, 11))
        options = dl.TrainingOptions(epochs=1, batch_size=24, verbose_every=0, flip=flip)
        dl.train(net, store, options, world=world)
        hashes.add(weights_sha256(net))
    assert len(hashes) == 2


@pytest.mark.parametrize("kind", ["classes", "pixels"])
def test_scores_averaged_over_mirror_images(world, kind):
    end = dl.Dense(3) if kind == "classes" else dl.Conv2D(1, 3)
    net = dl.Network([dl.Conv2D(3, 4, padding=1), dl.ReLU(), end], (3, 10, 11), seed=1)
    images = numbers("mirrored", 40, 3, 10, 11, low=0, high=256).astype(np.uint8)
    options = {"softmax": False, "test_flips": "xy"}
    scores = dl.predict(net, images, world=world, **options)
    assert abs(scores - dl.predict(net, images, world=dl.World(threads=1), **options)).max() < 1e-5
    assert abs(scores - dl.predict(net, images, world=world, softmax=False)).max() > 1e-3
