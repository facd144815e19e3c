"""Compare labels, targets and mini-batch functions on the emulated GPU with the CPU."""

from types import SimpleNamespace

import numpy as np
import pytest
from image_sets import ReadArrays
from single_rank import numbers
from test_gpu_input import MOVED, WARPED, queue_options

import mpidl as dl
from mpidl import losses
from mpidl.backends.gpu import launching, program
from mpidl.backends.gpu.recorder import Recorder
from mpidl.data.loading import device_queue
from mpidl.evaluation import evaluate
from mpidl.training.files.model_file import weights_sha256
from mpidl.training.gpu_step import GPUStep


def paired(count, shape=None, kind=np.float32, classes=3):
    """Return images with targets of this shape and dtype, or with labels if `shape` is None."""
    pixels = numbers("paired", count, 3, 10, 11, low=0, high=256).astype(np.uint8)
    if shape is None:
        return ReadArrays(pixels, labels=np.arange(count) % classes)
    high = classes if kind == np.int32 else 1
    targets = numbers(f"targets {shape}", count, *shape, low=0, high=high).astype(kind)
    return ReadArrays(pixels, targets)


KINDS = [
    (None, None),
    ((), np.float32),
    ((5,), np.float32),
    ((10, 11), np.float32),
    ((1, 10, 11), np.float32),
    ((3, 5, 7), np.float32),
    ((), np.int32),
    ((4,), np.int32),
    ((10, 11), np.int32),
    ((2, 10, 11), np.int32),
]


def add_noise(images, labels, keys):
    """Return smaller float images and float targets. The noise depends on sample and epoch."""
    noise = np.concatenate(
        [dl.keyed.uniform(keys.seed, "f", 1, epoch=keys.epoch, sample=int(i)) for i in keys.indices]
    )
    scaled = images[:, :2, 1:].astype(np.float32) * noise.reshape(-1, 1, 1, 1).astype(np.float32)
    return scaled, (np.asarray(labels, np.float32).reshape(len(images), -1) - noise[:, None])


def relabel(images, labels, keys):
    return 255 - images, (labels + keys.indices + keys.epoch) % 3


def assert_same_lanes(lanes, expected):
    """Check that lanes on the GPU have the CPU's bytes. More blocks of zeros may follow."""
    lanes = lanes.numpy()
    assert lanes.dtype == expected.dtype and lanes.shape[1:] == expected.shape[1:]
    assert lanes[: len(expected)].tobytes() == expected.tobytes()
    assert not lanes[len(expected) :].any()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("shape, kind", KINDS)
def test_a_queue_uploads_targets(world, shape, kind, cached):
    store = paired(40, shape, kind)
    source = dl.data.NodeCache(store, None, 20 * 4000) if cached else store
    queue, host = (dl.MinibatchQueue(s, 24, 3, w) for s, w in ((source, world), (store, None)))
    for _ in range(1 + cached):
        for (x, y), (host_x, host_y) in zip(queue.epoch(1), host.epoch(1), strict=True):
            assert_same_lanes(x.lanes, host_x.lanes)
            assert_same_lanes(y.lanes, host_y.lanes)
            assert y.image_shape == host_y.image_shape and y.shape == host_y.shape
            if host_y.dtype == np.int32:
                local = host_y.local()
                assert y.lanes.bounds.limits == (local.min(), local.max())


class ReadProgram:
    """A recorded program that reads the images and targets of a Feed as a training step does."""

    def __init__(self, queue):
        self.reader = queue.reader()
        recorder = Recorder(launching.device())
        with launching.through(recorder):
            values = self.reader.read()
            self.copies = [
                None if v is None else launching.persistent(v.lanes.dims, v.dtype) for v in values
            ]
            for value, copy in zip(values, self.copies, strict=True):
                if value is not None:
                    copy.order = value.lanes.order
                    recorder.store(value.lanes, copy)
            count = values[0].batch.per_image.array
            self.program = recorder.finish({"per image": count})

    def run(self, feed):
        row = self.program.ready() % program.ROWS
        self.program.run(**self.reader.values(feed, row))
        return self.copies


def assert_same_batches(store, world, monkeypatch, resident=True, epochs=2, size=24, **options):
    """Check that a program reads the same mini-batches as the CPU. Return the DeviceQueue."""
    monkeypatch.setattr(device_queue, "RESIDENT", 0.5 if resident else 0.0)
    queue = device_queue.DeviceQueue(store, size, 3, world, "every-epoch", workers=2, **options)
    host = dl.MinibatchQueue(store, size, 3, **options)
    reader, share = ReadProgram(queue), slice(*queue.full_batch.tree.run)
    for epoch in range(1, 1 + epochs):
        for (feed, _), batch in zip(queue.epoch(epoch), host.epoch(epoch), strict=True):
            for lanes, expected in zip(reader.run(feed), batch, strict=True):
                assert (lanes is None) == (expected is None)
                if expected is not None:
                    assert_same_lanes(lanes, expected.lanes[share])
    return queue


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("shape, kind", KINDS)
def test_a_recorded_step_reads_targets(world, shape, kind, resident, monkeypatch):
    """Test more than ROWS mini-batches, a smaller last mini-batch, and a dataset in parts."""
    monkeypatch.setattr(device_queue, "UPLOADED", 10_000)
    store = paired(70, shape, kind)
    queue = assert_same_batches(store, world, monkeypatch, resident, epochs=4)
    assert queue.resident == resident and 4 * len(queue) > program.ROWS


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("rank, size", [(0, 3), (1, 3), (2, 3)])
def test_each_rank_reads_its_share(world, rank, size, resident, monkeypatch):
    """The third rank has no images in mini-batches of 24, or in the last one if the size is 40."""
    share = SimpleNamespace(rank=rank, size=size, device=world.device, counts=world.counts)
    for count in (24, 40):
        store = paired(100, (1, 10, 11))
        assert_same_batches(store, share, monkeypatch, resident, size=count)


def test_images_with_neither_labels_nor_targets(world, monkeypatch):
    store = dl.ArrayDatastore(paired(30).images)
    for resident in (True, False):
        assert_same_batches(store, world, monkeypatch, resident)


@pytest.mark.parametrize("function", [add_noise, relabel, lambda images, labels, keys: images])
@pytest.mark.parametrize("ranges", [None, MOVED, WARPED])
def test_images_and_labels_of_a_function_are_staged(world, function, ranges, monkeypatch):
    options = queue_options(ranges, "none" if ranges else "zscore", paired(40))
    if function is add_noise:
        options.pop("normalization")  # computed for the original channels
    assert_same_batches(paired(60), world, monkeypatch, function=function, **options)


def test_a_function_can_move_images_with_their_targets(world, monkeypatch):
    store = paired(60, (10, 11), np.int32)

    def flip(images, targets, keys):
        return images[..., ::-1], targets[..., ::-1]

    queue = assert_same_batches(store, world, monkeypatch, function=flip)
    assert not queue.resident


@pytest.mark.parametrize("shape, kind", [(None, None), ((), np.float32), ((4,), np.int32)])
def test_warped_images_are_staged_with_labels_or_vectors(world, shape, kind, monkeypatch):
    options = queue_options(WARPED, "zerocenter-element", paired(40))
    queue = assert_same_batches(paired(60, shape, kind), world, monkeypatch, **options)
    assert not queue.resident


COLOURED = {"resized_crop": (7, 6), "brightness": 0.5, "erase": 1.0}


@pytest.mark.parametrize("ranges", [MOVED, WARPED, COLOURED])
@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_image_targets_move_on_the_host(world, ranges, kind, monkeypatch):
    options = queue_options(ranges, "none", paired(40))
    queue = assert_same_batches(paired(60, (10, 11), kind), world, monkeypatch, **options)
    assert not queue.resident


def test_resident_datasets_fit_with_their_targets(world, monkeypatch):
    store = paired(30, (1, 10, 11))
    nbytes = store.images.nbytes + store.values.nbytes
    for limit, resident in ((nbytes + 0.5, True), (nbytes - 0.5, False)):
        monkeypatch.setattr(device_queue, "RESIDENT", limit / world.device.memory)
        assert device_queue.DeviceQueue(store, 10, 0, world, "never").resident == resident


# ---- training ----


def trained(world, store, net, loss, epochs=2, **options):
    """Train with recorded steps on the GPU, or on the CPU; return the network and the losses."""
    sgdm, values = dl.SGDM(1e-2, 0.9), []
    if world.device is None:
        gradient = dl.value_and_grad(loss, reduce=world)
        for epoch in range(1, 1 + epochs):
            for images, targets in dl.MinibatchQueue(store, 24, 3, world, **options).epoch(epoch):
                value, gradients, net.state = gradient(net, images, targets)
                net.parameters = sgdm(net.parameters, gradients)
                values.append(float(value[0]))
        return net, values
    queue = device_queue.DeviceQueue(store, 24, 3, world, "every-epoch", **options)
    step = GPUStep(net, sgdm, loss, world, 1, queue.reader(), str)
    started = []
    for epoch in range(1, 1 + epochs):
        for feed, _ in queue.epoch(epoch):
            started.append(step.start(feed))
            if len(started) > 4:
                values.append(step.finish(started.pop(0))[0])
    values += [step.finish(pending)[0] for pending in started]
    return net.to(None), values


def assert_learns_as_the_cpu(world, store, make, loss, **options):
    (net, losses), (host, expected) = (
        trained(w, store, make(), loss, **options) for w in (world, dl.World(threads=1))
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for name, value in host.parameters.items():
        error = abs(net.parameters[name] - value).max()
        assert error < 1e-4 * max(abs(value).max(), 1e-3), name
    assert len(set(expected)) == len(expected) > 1


def classifier(shape=(3, 10, 11)):
    return dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(3)], shape)


@pytest.mark.parametrize("resident", [True, pytest.param(False, marks=pytest.mark.slow("gpu"))])
def test_integer_targets_are_labels(world, resident, monkeypatch):
    monkeypatch.setattr(device_queue, "RESIDENT", 0.5 if resident else 0.0)
    store = paired(70, (), np.int32)
    assert_learns_as_the_cpu(world, store, classifier, losses.cross_entropy)
    labelled = dl.ArrayDatastore(store.images, store.values)
    hashes = {
        weights_sha256(trained(world, s, classifier(), losses.cross_entropy)[0])
        for s in (store, labelled)
    }
    assert len(hashes) == 1


def test_label_rules(world):
    """Every replay computes the total weight of the mini-batch's labels on the GPU."""
    store = paired(70, (10, 11), np.int32)
    for i, labels in enumerate(store.values):
        labels[: i % 7] = 255
    rule = {"class_weights": [0.5, 1, 3], "ignore_label": 255}
    for loss in (
        dl.CrossEntropy(**rule, label_smoothing=0.1),
        dl.CrossEntropy(**rule, focal_gamma=2),
    ):
        assert_learns_as_the_cpu(world, store, pixel_classifier, loss)


@pytest.mark.parametrize(
    "loss",
    [
        dl.BinaryCrossEntropy([0.5, 1, 3], ignore_label=-1, focal_gamma=0.5),
        pytest.param(dl.BinaryCrossEntropy(), marks=pytest.mark.slow("gpu")),
    ],
)
def test_several_labels(world, loss):
    store = paired(70, (3,), np.int32 if loss.ignore_label else np.float32, classes=2)
    if loss.ignore_label:
        store.values[::3, 1] = -1
    assert_learns_as_the_cpu(world, store, classifier, loss)


@pytest.mark.slow("gpu")
@pytest.mark.parametrize(
    ("outputs", "loss"),
    [
        (3, dl.Dice(ignore_label=255, cross_entropy=dl.CrossEntropy(ignore_label=255))),
        (1, dl.Dice()),
        (3, dl.Tversky(ignore_label=255, alpha=0.2)),
        (3, dl.Dice([0, 1, 2], generalized=True)),
    ],
)
def test_the_dice_loss(world, outputs, loss):
    store = paired(70, (10, 11), np.int32, classes=max(outputs, 2))
    if loss.ignore_label:
        store.values[:, :2] = 255
    assert_learns_as_the_cpu(world, store, lambda: pixel_classifier(outputs), loss)


def test_training_on_the_labels_of_a_function(world):
    assert_learns_as_the_cpu(world, paired(60), classifier, losses.cross_entropy, function=relabel)


MIXED = {"mixing": dl.data.Mixing(mixup=0.5, cutmix=1.0, probability=0.8), "classes": 3}


@pytest.mark.parametrize("ranges", [None, pytest.param(MOVED, marks=pytest.mark.slow("gpu"))])
def test_mixed_images_and_labels_are_staged(world, ranges, monkeypatch):
    options = queue_options(ranges, "none", paired(40)) if ranges else {}
    queue = assert_same_batches(paired(60), world, monkeypatch, **options, **MIXED)
    assert not queue.resident


@pytest.mark.parametrize("smoothing", [0.0, pytest.param(0.1, marks=pytest.mark.slow("gpu"))])
def test_training_on_mixed_images(world, smoothing):
    loss = dl.CrossEntropy(label_smoothing=smoothing)
    assert_learns_as_the_cpu(world, paired(60), classifier, loss, **MIXED)


def shades():
    """Return a network with images (1, 10, 11) as outputs."""
    layers = [dl.Conv2D(3, 4, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Conv2D(3, 1, padding=1)]
    return dl.Network(layers, (3, 10, 11))


def pixel_classifier(outputs=3):
    """Return a network with scores for each pixel."""
    layers = [dl.Conv2D(3, 4, padding=1), dl.BatchNorm(), dl.ReLU()]
    layers.append(dl.Conv2D(3, outputs, padding=1))
    return dl.Network(layers, (3, 10, 11))


def regression(outputs):
    return lambda: dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(outputs)], (3, 10, 11))


TASKS = {
    "denoiser": (shades, "mse", (1, 10, 11), np.float32),
    "maps": (shades, "mse", (10, 11), np.float32),
    "number": (regression(1), "mse", (), np.float32),
    "numbers": (regression(5), "mse", (5,), np.float32),
    "label per pixel": (pixel_classifier, "crossentropy", (10, 11), np.int32),
    "image of labels": (pixel_classifier, "crossentropy", (1, 10, 11), np.int32),
}


@pytest.mark.parametrize("resident", [True, pytest.param(False, marks=pytest.mark.slow("gpu"))])
@pytest.mark.parametrize(
    "task",
    [
        pytest.param(
            task,
            marks=[pytest.mark.slow("gpu")] * (task not in ("number", "label per pixel")),
        )
        for task in TASKS
    ],
)
def test_recorded_steps_learn_as_the_cpu(world, task, resident, monkeypatch):
    monkeypatch.setattr(device_queue, "RESIDENT", 0.5 if resident else 0.0)
    make, loss, shape, kind = TASKS[task]
    assert_learns_as_the_cpu(world, paired(70, shape, kind), make, losses.loss_function(loss))


@pytest.mark.parametrize(
    "task",
    [
        "number",
        *(
            pytest.param(task, marks=pytest.mark.slow("gpu"))
            for task in ("label per pixel", "numbers", "denoiser", "maps")
        ),
    ],
)
def test_the_training_loop_and_evaluation_take_targets(world, task):
    make, loss, shape, kind = TASKS[task]
    store, results = paired(60, shape, kind), []
    options = {"epochs": 2, "batch_size": 24, "verbose_every": 0, "loss": loss}
    options = dl.TrainingOptions(**options, validation=store, validation_frequency=4)
    for rank in (world, dl.World(threads=1)):
        net = make()
        training = dl.train(net, store, options, world=rank)
        evaluation = evaluate.evaluate(net, store, world=rank, loss=loss)
        assert (evaluation.accuracy is None) == (loss == "mse")
        results.append((training.loss, evaluation.loss, evaluation.accuracy or 0.0))
    assert results[0][:2] == pytest.approx(results[1][:2], rel=1e-4)
    assert results[0][2] == pytest.approx(results[1][2], abs=1e-3)  # a few pixels may differ


def test_a_custom_loss_with_targets_of_a_function(world):
    """The loss is the sum of two means, and a mini-batch function computes the targets."""

    def clean(images, labels, keys):
        return 255 - images, images[:, :1].astype(np.float32) / 255

    def loss(net, images, targets):
        y = net(images)
        value = dl.mean_squared_error(y, targets) + dl.mean_absolute_error(y, targets)
        return value, dl.mean_squared_error(y, targets)

    assert_learns_as_the_cpu(world, paired(60), shades, loss, function=clean)


def with_invalid_label(value):
    """Return 48 images with labels. The label of image 30 is `value`."""
    store = paired(48, (), np.int32)
    store.values[30] = value
    return store


@pytest.mark.parametrize("value", [3, -1])
def test_invalid_labels_raise_the_error_of_the_cpu(world, value, monkeypatch):
    """Resident labels are checked before the first step, staged labels with their mini-batch."""
    store, texts = with_invalid_label(value), []
    monkeypatch.setattr(device_queue, "UPLOADED", 5_000)  # the third part has the invalid label
    for resident in (True, False):
        monkeypatch.setattr(device_queue, "RESIDENT", 0.5 if resident else 0.0)
        with pytest.raises(ValueError) as raised:
            trained(world, store, classifier(), losses.cross_entropy)
        texts.append(str(raised.value))
    with pytest.raises(ValueError) as raised:
        trained(dl.World(threads=1), store, classifier(), losses.cross_entropy)
    assert texts == 2 * [str(raised.value)]
    low, high = min(value, 0), max(value, 2)
    assert f"expected labels in 0..2, the classes of the scores, got {low}..{high}" in texts[0]


def test_steps_before_an_invalid_label_are_taken(world, monkeypatch):
    monkeypatch.setattr(device_queue, "RESIDENT", 0.0)
    queue = device_queue.DeviceQueue(with_invalid_label(7), 24, 0, world, "never")
    net, sgdm = classifier(), dl.SGDM(1e-2)
    step = GPUStep(net, sgdm, losses.cross_entropy, world, 1, queue.reader(), str)
    (first, _), (second, _) = queue.epoch(0)
    before = step.finish(step.start(first))[0]
    with pytest.raises(ValueError, match="got 0..7"):
        step.start(second)
    assert step.finish(step.start(first))[0] < before
