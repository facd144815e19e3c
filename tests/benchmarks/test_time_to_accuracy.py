"""Test the benchmark `time_to_accuracy`: its results and PyTorch's training, but no times."""

import argparse

import numpy as np
import pytest
from short_training import pictures
from single_rank import numbers

import mpidl as dl
from benchmarks import time_to_accuracy
from mpidl.data.transforms import normalize
from mpidl.errors import Fault
from mpidl.training.schedules import rate_of

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def result(seconds, speed=100.0):
    return {"seconds": seconds, "images_per_second": speed, "accuracies": [0.5, 0.9]}


def test_the_ratio_is_that_of_medians(capsys):
    results = {"ours": [result(2.0), result(4.0)], "torch": [result(9.0, 50.0), result(6.0, 30.0)]}
    assert time_to_accuracy.summarize(results) == {"ratio": 2.5, "speed_ratio": 2.5}
    assert "ratio 2.50 of the times" in capsys.readouterr().out
    assert time_to_accuracy.describe(result(3.0)) == (
        "3.0 s; 100 images/s; accuracies 0.5000, 0.9000"
    )
    with pytest.raises(Fault, match="has not reached the accuracy"):
        time_to_accuracy.summarize({"ours": [result(None)], "torch": [result(1.0)]})


def test_the_clock_ends_a_training(world):
    job = argparse.Namespace(network="fashion", epochs=3, threads=1, precision="bf16")
    options = time_to_accuracy.recipe(job, 0)
    assert options.partial_minibatch == "discard" and options.epochs == 3
    assert options.precision == "bf16"
    for accuracy, epochs in ((0.0, 1), (1.1, 3)):
        clock = time_to_accuracy.Clock(pictures(30, "others"), accuracy)
        net = dl.nn.zoo.fashion((1, 6, 6), 3)
        small = dl.TrainingOptions.from_recipe("fashion", epochs=3, batch_size=40, verbose="off")
        dl.train(net, pictures(80), small, world=world, hooks=[clock])
        assert len(clock.result()["accuracies"]) == epochs
        assert (clock.result()["seconds"] is None) == (accuracy > 1)


def changed(options, count=64, epoch=1):
    """Return uint8 images, the batch that PyTorch's training makes from them, and its Images."""
    from benchmarks.torch_training import Images

    torch.manual_seed(0)
    pixels = numbers("torch", count, 2, 6, 5, low=1, high=255).astype(np.uint8)
    store = dl.ArrayDatastore(pixels, np.arange(count) % 3)
    normalization = normalize.normalization("zscore", store)
    images = Images(pixels, store.labels, normalization, options)
    batch, labels = images.batch(torch.arange(count), epoch)
    assert labels.tolist() == store.labels.tolist()
    return pixels, batch, images


def test_images_are_moved_and_mirrored():
    options = dl.TrainingOptions(flip="x", translate=1, normalization="zscore")
    pixels, batch, images = changed(options)
    padded, kinds = np.pad(pixels, ((0, 0), (0, 0), (1, 1), (1, 1))), set()
    for original, image in zip(padded, batch, strict=True):
        windows = {
            (top, left, step): images.normalized(
                torch.tensor(original[:, top : top + 6, left : left + 5][:, :, ::step].copy())
            )[0]
            for top in range(3)
            for left in range(3)
            for step in (1, -1)
        }
        (kind,) = (key for key, window in windows.items() if torch.equal(window, image))
        kinds.add(kind)
    assert len(kinds) > 12


def test_flips_alternate():
    options = dl.TrainingOptions(flip="x", flip_mode="alternate", normalization="zscore")
    (pixels, first, images), (_, second, _) = (changed(options, epoch=e) for e in (1, 2))
    assert torch.equal(first.flip(3), second)
    plain = images.normalized(torch.tensor(pixels))
    is_plain = [torch.equal(a, b) for a, b in zip(plain, first, strict=True)]
    assert 16 < sum(is_plain) < 48


def test_rectangles_are_erased():
    options = dl.TrainingOptions(erase=0.5, normalization="zscore")
    pixels, batch, images = changed(options, count=400)
    is_changed = (batch != images.normalized(torch.tensor(pixels))).any(1)
    areas = is_changed.sum((1, 2))
    assert 0.4 < (areas > 0).float().mean() < 0.6 and areas.max() <= 16
    masks = images.rectangles(400)
    assert all(
        mask.any(1).sum() * mask.any(0).sum() == mask.sum() and mask.sum() <= 16 for mask in masks
    )


@pytest.mark.parametrize("variant", ["eager", "channels_last"])
def test_a_step_is_that_of_the_recipe(variant):
    """After three steps, weights, averages and the frozen whitening layer equal `dl.train`'s.

    The rate is constant, because PyTorch's momentum rescales earlier steps if the rate changes.
    """
    from benchmarks.torch_training import Model

    store = pictures(48)
    options = dl.TrainingOptions.from_recipe(
        *("cifar-fast",),
        **{"epochs": 3, "batch_size": 48, "warmup_epochs": 0, "learn_rate_schedule": "none"},
        **{"flip": "none", "flip_mode": "random", "translate": 0, "verbose": "off"},
        average_decay=0.5,
    )
    net, start = (dl.nn.zoo.cifar_fast((1, 6, 6), 3, filters=4) for _ in range(2))
    start.normalization = normalize.normalization("zscore", store)
    dl.whiten(start, store)
    dl.train(net, store, options, world=dl.World())
    model = Model(start, options, variant)
    images = torch.tensor(start.normalization(store.read(np.arange(48))))
    labels = torch.tensor(store.labels.astype(np.int64))
    for i in range(1, 4):
        model.step(images, labels, rate_of(options, i, i, 1))
    from benchmarks.torch_step import named_learnables

    names = [name for name, p in named_learnables(model.module) if p.requires_grad]
    assert len(names) == len(net.parameters) - 2 == len(model.averages)
    averages = {id(p): average for p, average in zip(model.parameters, model.averages, strict=True)}
    for name, parameter in named_learnables(model.module):
        expected = net.parameters[name]
        array = averages.get(id(parameter), parameter).detach().numpy()
        assert abs(array - expected).max() <= 2e-4 * max(abs(expected).max(), 0.1), name
    assert 0 <= model.accuracy(images, labels) <= 1
