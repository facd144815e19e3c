"""Test Mixup and CutMix: random numbers, images and labels, on any number of ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
from image_sets import pixels_of, refusal
from op_references import softmax_reference
from single_rank import all_images

import mpidl as dl
from mpidl import losses
from mpidl.data.transforms import draws
from mpidl.data.transforms.draws import SampleKeys
from mpidl.data.transforms.mixing import Mixing, beta, draw
from mpidl.training import input_pipeline

SHAPE = (3, 12, 15)


def store_of(count, kind=np.uint8):
    images = pixels_of(count, count, *SHAPE).astype(kind)
    return dl.ArrayDatastore(images, np.arange(count) * 7 % 5)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.7, 1.0, 2.0, 8.0])
def test_weights_have_the_beta_distribution(alpha):
    """Weights have mean 1/2, variance 1 / (4 (2 alpha + 1)), and SciPy's distribution."""
    n = 20000
    w = beta(alpha, draws.uniforms(SampleKeys(np.arange(n), 1, 3), "beta", 64))
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(w.mean() - 0.5) < 5 * np.sqrt(variance / n)
    assert abs(w.var() - variance) < 0.05 * variance
    special = pytest.importorskip("scipy.special", reason="SciPy is not installed")
    places = np.linspace(0, 1, 101)[1:-1]
    empirical = np.searchsorted(np.sort(w), places, side="right") / n
    assert abs(empirical - special.betainc(alpha, alpha, places)).max() < 0.015


def test_partners_are_others_of_the_block():
    mixing, counts = Mixing(mixup=1.0), np.zeros((16, 16), int)
    for epoch in range(1, 400):
        partners = draw(mixing, SampleKeys(np.arange(16), epoch, 0), SHAPE).partners
        assert sorted(partners) == list(range(16)) and (partners != np.arange(16)).all()
        counts[np.arange(16), partners] += 1
    pairs = counts[~np.eye(16, dtype=bool)]
    assert pairs.min() > 8 and pairs.max() < 55  # 26.6 on average
    assert draw(mixing, SampleKeys(np.arange(1), 1, 0), SHAPE).partners.tolist() == [0]


def test_rectangles_and_weights():
    mixing = Mixing(mixup=0.5, cutmix=1.0, probability=0.75)
    blocks = np.arange(8000).reshape(-1, 16)
    plans = [draw(mixing, SampleKeys(block, 1, 2), (1, 40, 50)) for block in blocks]
    weights = np.concatenate([plan.weights for plan in plans])
    boxes = np.concatenate([plan.boxes for plan in plans])
    area = boxes[:, 2] * boxes[:, 3]
    cuts = area > 0
    assert np.array_equal(weights[cuts], 1 - area[cuts] / 2000)
    assert (boxes[:, 0] + boxes[:, 2]).max() == 40 and (boxes[:, 1] + boxes[:, 3]).max() == 50
    assert abs(cuts.mean() - 0.375) < 0.03  # few rectangles are empty
    assert abs((weights == 1).mean() - 0.25) < 0.03
    inside = cuts & (boxes[:, :2] > 0).all(axis=1) & (boxes[:, 0] + boxes[:, 2] < 40)
    inside &= boxes[:, 1] + boxes[:, 3] < 50
    ratio = boxes[inside, 3] / boxes[inside, 2]
    assert abs(np.median(ratio) - 50 / 40) < 0.1  # the aspect ratio of the image


def plain(images, labels, samples, mixing, epoch, seed):
    """Combine the images of one block in float64, pixel by pixel."""
    plan = draw(mixing, SampleKeys(samples, epoch, seed), images.shape[1:])
    out, targets = images.astype(np.float64), np.zeros((len(images), 5))
    for i, (j, w, (top, left, height, width)) in enumerate(zip(*plan, strict=True)):
        for p, q in np.ndindex(images.shape[2:]):
            if height * width == 0:
                out[i, :, p, q] = w * images[i, :, p, q] + (1 - w) * images[j, :, p, q]
            elif top <= p < top + height and left <= q < left + width:
                out[i, :, p, q] = images[j, :, p, q]
        targets[i, labels[i]] += w
        targets[i, labels[j]] += 1 - w
    return out, targets


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
@pytest.mark.parametrize("alphas", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 1.0, "cutmix": 1.0}])
def test_a_queue_mixes_augmented_images(kind, alphas):
    store, mixing = store_of(90, kind), Mixing(**alphas, probability=0.8)
    augmenter = dl.Augmenter(reflect_x=True, translate_x=2)
    queue = dl.MinibatchQueue(store, 53, 4, augmenter=augmenter, mixing=mixing, classes=5)
    changed = 0
    for images, targets in queue.epoch(2):
        samples = images.batch.indices
        pixels = augmenter.apply(store.read(samples), samples, epoch=2, seed=4)
        labels, scale = store.labels[samples], 255 if kind == np.uint8 else 1
        assert targets.image_shape == (5,) and targets.dtype == np.float32
        for first in range(0, len(samples), 16):
            block = slice(first, first + 16)
            expected = plain(pixels[block], labels[block], samples[block], mixing, 2, 4)
            error = abs(images.local()[block] * scale - expected[0]).max()
            assert error < (0.51 if kind == np.uint8 else 1e-4)
            assert abs(targets.local()[block] - expected[1]).max() < 1e-7
            changed += (expected[0] != pixels[block]).any(axis=(1, 2, 3)).sum()
        assert np.allclose(targets.local().sum(axis=1), 1, atol=1e-6)
    assert changed > 50


@pytest.mark.parametrize("size, workers, prefetch", [(2, 1, 0), (3, 4, 2), (5, 2, 1)])
def test_the_same_on_any_number_of_ranks_and_workers(size, workers, prefetch):
    options = {"mixing": Mixing(mixup=1.0, cutmix=1.0), "classes": 5}
    store = store_of(150)
    on_one_rank = dl.MinibatchQueue(store, 80, 1, **options, prefetch=0).epoch(3)
    options |= {"prefetch": prefetch, "workers": workers}
    worlds = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    shares = [dl.MinibatchQueue(store, 80, 1, world, **options).epoch(3) for world in worlds]
    for parts, expected in zip(zip(*shares, strict=True), on_one_rank, strict=True):
        for kind in (0, 1):
            values = np.concatenate([part[kind].local() for part in parts])
            assert values.tobytes() == expected[kind].local().tobytes()


def test_loss_and_accuracy_are_those_of_two_labels(world):
    """The loss is w CE(a) + (1 - w) CE(b). A correct prediction counts w or 1 - w."""
    store, mixing = store_of(40), Mixing(mixup=1.0)
    net = dl.Network([dl.Dense(5)], SHAPE, seed=1)
    queue = dl.MinibatchQueue(store, 40, 3, world, mixing=mixing, classes=5)
    loss = dl.CrossEntropy(label_smoothing=0.1)
    images, targets = next(queue.epoch(1))
    total, correct = (float(value) for value in world.gplus(loss(net, images, targets)))
    scores = all_images(world, net.logits(images))
    logs = np.log(softmax_reference(scores))
    order, expected_loss, expected_correct = queue.order(1), 0.0, 0.0
    for first in range(0, 40, 16):
        samples = order[first : first + 16]
        plan = draw(mixing, SampleKeys(samples, 1, 3), SHAPE)
        a = store.labels[samples]
        for i, w in enumerate(plan.weights):
            for label, weight in ((a[i], w), (a[plan.partners[i]], 1 - w)):
                row = logs[first + i]
                smooth = 0.9 * row[label] + 0.1 * row.mean()
                expected_loss -= weight * smooth / 40
                expected_correct += weight * (scores[first + i].argmax() == label)
    assert total == pytest.approx(expected_loss, rel=1e-6)
    assert correct == pytest.approx(expected_correct, rel=1e-6)


def test_training_learns_from_mixed_images(world):
    images = pixels_of(0, 120, 1, 8, 8) // 4
    labels = np.arange(120) % 2
    images[labels == 1, :, 2:5] += 120
    store = dl.ArrayDatastore(images, labels)
    accuracies = {}
    for options in ({}, {"mixup": 1.0}, {"cutmix": 1.0, "mix_probability": 0.5}):
        net = dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(2)], (1, 8, 8), seed=0)
        settings = dl.TrainingOptions(
            epochs=6, batch_size=30, learning_rate=0.05, shuffle="every-epoch", **options
        )
        result = dl.train(net, store, settings, world=world)
        accuracies[tuple(options)] = result.history.iteration.accuracy[-4:].mean()
        assert dl.evaluate(net, store, world=world).accuracy > 0.9
    assert accuracies["mixup",] < accuracies[()]  # a correct label counts less than 1


def test_options_are_checked():
    for options, text in (
        ({"mixup": 0.01}, "mixup must be 0, or between 0.05 and 10, found 0.01"),
        ({"cutmix": 11}, "cutmix must be 0, or between 0.05 and 10, found 11"),
        ({}, "mixup and cutmix: expected a number above 0 for one of them"),
        ({"mixup": 1, "probability": 0}, "probability must be above 0 and at most 1, found 0"),
    ):
        assert refusal(Mixing, **options) == text
    images = store_of(40)
    net = dl.Network([dl.Dense(5)], SHAPE)

    def refused(store=images, **options):
        return refusal(input_pipeline.check, net, store, dl.TrainingOptions(**options))

    assert refused(mixup=1).startswith("--mixup and --cutmix: expected --shuffle every-epoch")
    mixed = {"mixup": 1, "shuffle": "every-epoch"}
    for options in ({"class_weights": "balanced"}, {"focal_gamma": 2}, {"ignore_label": 9}):
        text = refused(**mixed, **options)
        assert text.startswith("--mixup and --cutmix: expected --loss crossentropy without")
        assert text.endswith(f"found {next(iter(options))}")
    numbers = dl.data.combined(images, np.zeros((40, 5), np.float32))
    text = refused(numbers, **mixed, loss="mse")
    assert text.startswith("--mixup and --cutmix: expected --loss crossentropy without")
    text = refusal(dl.MinibatchQueue, images, mixing=Mixing(mixup=1))
    assert text == "mixing: expected classes=, the number of classes of the labels"
    assert losses.loss_function("crossentropy")
