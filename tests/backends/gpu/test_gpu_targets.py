"""Labels and targets of any shape on the emulated GPU, and functions of one's own: what the CPU is
given, and what it learns from that."""

from types import SimpleNamespace

import numpy as np
import pytest
from image_sets import refusal
from single_rank import numbers
from test_gpu_input import WARPED, WHOLE, plan

import mpidl as dl
from mpidl import losses
from mpidl.backends.gpu import launching, program
from mpidl.backends.gpu.recorder import Recorder
from mpidl.data.loading import device_queue
from mpidl.evaluation import evaluate
from mpidl.training import trainer
from mpidl.training.files.model_file import weights_sha256
from mpidl.training.gpu_step import StepProgram


class Paired(dl.data.Datastore):
    """Images that are read anew each time, with targets, or with labels where shape is None."""

    def __init__(self, count, shape=None, kind=np.float32, classes=3):
        self.pixels = numbers("paired", count, 3, 10, 11, low=0, high=256).astype(np.uint8)
        self.image_shape = self.pixels.shape[1:]
        if shape is None:
            self.labels, self.classes = np.arange(count) % classes, ["a"] * classes
            return
        self.targets_shape, self.targets_dtype = shape, np.dtype(kind)
        high = classes if kind == np.int32 else 1
        self.values = numbers(f"targets {shape}", count, *shape, low=0, high=high).astype(kind)

    def __len__(self):
        return len(self.pixels)

    def read(self, indices):
        return self.pixels[indices]

    def targets(self, indices):
        return self.values[indices]


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


def changed(images, labels, at):
    """Other images and labels, keyed by the sample and the epoch."""
    drawn = [dl.keyed.uniform(at.seed, "f", 1, epoch=at.epoch, sample=int(i)) for i in at.indices]
    noise = np.concatenate(drawn)
    found = images[:, :2, 1:].astype(np.float32) * noise.reshape(-1, 1, 1, 1).astype(np.float32)
    return found, (np.asarray(labels, np.float32).reshape(len(images), -1) - noise[:, None])


def relabelled(images, labels, at):
    return 255 - images, (labels + at.indices + at.epoch) % 3


def same(found, expected):
    """Lanes on the GPU against those of the CPU; on the GPU there may be more blocks, of zeros."""
    found = found.numpy()
    assert found.dtype == expected.dtype and found.shape[1:] == expected.shape[1:]
    assert found[: len(expected)].tobytes() == expected.tobytes()
    assert not found[len(expected) :].any()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("shape, kind", KINDS)
def test_a_queue_uploads_targets(world, shape, kind, cached):
    store = Paired(40, shape, kind)
    seen = dl.data.NodeCache(store, None, 20 * 4000) if cached else store
    queue, host = (dl.MinibatchQueue(s, 24, 3, w) for s, w in ((seen, world), (store, None)))
    for _ in range(1 + cached):
        for (images, found), (wanted, known) in zip(queue.epoch(1), host.epoch(1), strict=True):
            same(images.lanes, wanted.lanes)
            same(found.lanes, known.lanes)
            assert found.image_shape == known.image_shape and found.shape == known.shape
            if known.dtype == np.int32:
                local = known.local()
                assert found.lanes.bounds.limits == (local.min(), local.max())


class Told:
    """A program that keeps what a recorded step reads of each Feed."""

    def __init__(self, queue):
        self.reader = queue.reader()
        recorder = Recorder(launching.device())
        with launching.through(recorder):
            read = self.reader.read()
            self.kept = [
                None if r is None else launching.persistent(r.lanes.dims, r.dtype) for r in read
            ]
            for one, kept in zip(read, self.kept, strict=True):
                if one is not None:
                    kept.order = one.lanes.order
                    recorder.carry(one.lanes, kept)
            count = read[0].batch.per_image.array
            self.program = recorder.finish({"per image": count})

    def tell(self, feed):
        row = self.program.ready() % program.ROWS
        self.program.run(**self.reader.values(feed, row))
        return self.kept


def told_as_the_cpu_reads(store, world, monkeypatch, resident=True, epochs=2, size=24, **how):
    """Each mini-batch of a DeviceQueue, as a program reads it, has the bytes of the CPU's."""
    monkeypatch.setattr(device_queue, "RESIDENT", 0.5 if resident else 0.0)
    queue = device_queue.DeviceQueue(store, size, 3, world, "every-epoch", workers=2, **how)
    host = dl.MinibatchQueue(store, size, 3, **how)
    told, mine = Told(queue), slice(*queue.full_batch.tree.run)
    for epoch in range(1, 1 + epochs):
        for (feed, _), whole in zip(queue.epoch(epoch), host.epoch(epoch), strict=True):
            for found, expected in zip(told.tell(feed), whole, strict=True):
                assert (found is None) == (expected is None)
                if expected is not None:
                    same(found, expected.lanes[mine])
    return queue


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("shape, kind", KINDS)
def test_a_recorded_step_reads_targets(world, shape, kind, resident, monkeypatch):
    """More mini-batches than places for them, the last of each epoch smaller; a set that is
    uploaded in several parts."""
    monkeypatch.setattr(device_queue, "UPLOADED", 10_000)
    store = Paired(70, shape, kind)
    queue = told_as_the_cpu_reads(store, world, monkeypatch, resident, epochs=4)
    assert queue.resident == resident and 4 * len(queue) > program.ROWS


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("rank, size", [(0, 3), (1, 3), (2, 3)])
def test_each_rank_reads_its_share(world, rank, size, resident, monkeypatch):
    """Of 24 images in two blocks the third rank has none, of 40 in the smaller mini-batch."""
    share = SimpleNamespace(rank=rank, size=size, device=world.device, counts=world.counts)
    for count in (24, 40):
        store = Paired(100, (1, 10, 11))
        told_as_the_cpu_reads(store, share, monkeypatch, resident, size=count)


def test_images_with_neither_labels_nor_targets(world, monkeypatch):
    store = dl.ArrayDatastore(Paired(30).pixels)
    for resident in (True, False):
        told_as_the_cpu_reads(store, world, monkeypatch, resident)


@pytest.mark.parametrize("function", [changed, relabelled, lambda images, labels, at: images])
@pytest.mark.parametrize("ranges", [None, WHOLE, WARPED])
def test_a_function_s_images_and_labels_are_staged(world, function, ranges, monkeypatch):
    how = plan(ranges, "none" if ranges else "zscore", Paired(40))
    if function is changed:
        how.pop("normalization")  # of as many channels as there were
    told_as_the_cpu_reads(Paired(60), world, monkeypatch, function=function, **how)


def test_a_function_moves_images_with_their_targets(world, monkeypatch):
    store = Paired(60, (10, 11), np.int32)

    def flipped(images, targets, at):
        return images[..., ::-1], targets[..., ::-1]

    queue = told_as_the_cpu_reads(store, world, monkeypatch, function=flipped)
    assert not queue.resident


@pytest.mark.parametrize("shape, kind", [(None, None), ((), np.float32), ((4,), np.int32)])
def test_warped_images_with_what_is_no_image(world, shape, kind, monkeypatch):
    how = plan(WARPED, "zerocenter-element", Paired(40))
    queue = told_as_the_cpu_reads(Paired(60, shape, kind), world, monkeypatch, **how)
    assert not queue.resident


@pytest.mark.parametrize("ranges", [WHOLE, WARPED])
def test_an_augmenter_leaves_no_image_targets_behind(world, ranges):
    store, how = Paired(60, (10, 11), np.int32), plan(ranges, "none", Paired(40))
    text = refusal(device_queue.DeviceQueue, store, 24, 0, world, "never", **how)
    assert "an augmenter moves images and not their targets" in text


def test_room_is_for_images_with_their_targets(world, monkeypatch):
    store = Paired(30, (1, 10, 11))
    nbytes = store.pixels.nbytes + store.values.nbytes
    for room, resident in ((nbytes + 0.5, True), (nbytes - 0.5, False)):
        monkeypatch.setattr(device_queue, "RESIDENT", room / world.device.memory)
        assert device_queue.DeviceQueue(store, 10, 0, world, "never").resident == resident


# Training on them


def trained(world, store, net, loss, epochs=2, **how):
    """The network after some epochs of recorded steps, or on the CPU; the losses."""
    gradient, sgdm = dl.value_and_grad(loss, reduce=world), dl.SGDM(1e-2, 0.9)
    found = []
    if world.device is None:
        for epoch in range(1, 1 + epochs):
            for images, targets in dl.MinibatchQueue(store, 24, 3, world, **how).epoch(epoch):
                value, gradients, net.state = gradient(net, images, targets)
                net.parameters = sgdm(net.parameters, gradients)
                found.append(float(value[0]))
        return net, found
    queue = device_queue.DeviceQueue(store, 24, 3, world, "every-epoch", **how)
    step = StepProgram(net.to(world.device), sgdm, gradient, queue.reader(), world.counts)
    started = []
    for epoch in range(1, 1 + epochs):
        for feed, _ in queue.epoch(epoch):
            started.append(step.start(feed))
            if len(started) > 4:
                found.append(step.finish(started.pop(0))[0])
    found += [step.finish(one)[0] for one in started]
    return net.to(None), found


def agrees_with_the_cpu(world, store, make, loss, **how):
    (net, losses), (host, expected) = (
        trained(w, store, make(), loss, **how) for w in (world, dl.World(threads=1))
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for name, value in host.parameters.items():
        error = abs(net.parameters[name] - value).max()
        assert error < 1e-4 * max(abs(value).max(), 1e-3), name
    assert len(set(expected)) == len(expected) > 1


def classifier(shape=(3, 10, 11)):
    return dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(3)], shape)


@pytest.mark.parametrize("resident", [True, False])
def test_whole_numbers_as_targets_are_labels(world, resident, monkeypatch):
    monkeypatch.setattr(device_queue, "RESIDENT", 0.5 if resident else 0.0)
    store = Paired(70, (), np.int32)
    agrees_with_the_cpu(world, store, classifier, losses.cross_entropy)
    labelled = dl.ArrayDatastore(store.pixels, store.values)
    hashes = {
        weights_sha256(trained(world, s, classifier(), losses.cross_entropy)[0])
        for s in (store, labelled)
    }
    assert len(hashes) == 1


def test_a_function_in_training(world):
    agrees_with_the_cpu(world, Paired(60), classifier, losses.cross_entropy, function=relabelled)


def shades():
    """Images (1, 10, 11) for images."""
    layers = [dl.Conv2D(3, 4, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Conv2D(3, 1, padding=1)]
    return dl.Network(layers, (3, 10, 11))


def pixel_classifier():
    """Three scores a pixel."""
    layers = [dl.Conv2D(3, 4, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Conv2D(3, 3, padding=1)]
    return dl.Network(layers, (3, 10, 11))


def regression(outputs):
    return lambda: dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(outputs)], (3, 10, 11))


LEARNED = {
    "denoiser": (shades, "mse", (1, 10, 11), np.float32),
    "maps": (shades, "mse", (10, 11), np.float32),
    "number": (regression(1), "mse", (), np.float32),
    "numbers": (regression(5), "mse", (5,), np.float32),
    "label a pixel": (pixel_classifier, "crossentropy", (10, 11), np.int32),
    "image of labels": (pixel_classifier, "crossentropy", (1, 10, 11), np.int32),
}


@pytest.mark.parametrize("resident", [True, pytest.param(False, marks=pytest.mark.slow("gpu"))])
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=[pytest.mark.slow("gpu")] * (what in ("maps", "image of labels")))
        for what in LEARNED
    ],
)
def test_a_step_learns_what_the_cpu_learns(world, what, resident, monkeypatch):
    monkeypatch.setattr(device_queue, "RESIDENT", 0.5 if resident else 0.0)
    make, loss, shape, kind = LEARNED[what]
    agrees_with_the_cpu(world, Paired(70, shape, kind), make, losses.loss_function(loss))


@pytest.mark.parametrize(
    "what",
    [
        *("number", "numbers", "label a pixel"),
        *(pytest.param(what, marks=pytest.mark.slow("gpu")) for what in ("denoiser", "maps")),
    ],
)
def test_the_loop_and_evaluation_take_targets(world, what):
    make, loss, shape, kind = LEARNED[what]
    store, found = Paired(60, shape, kind), []
    for held in (world, dl.World(threads=1)):
        how = {"epochs": 2, "batch_size": 24, "verbose_every": 0, "loss": loss}
        net = make()
        options = dl.TrainingOptions(**how, validation=store, validation_frequency=4)
        result = trainer.train(net, store, options, world=held)
        seen = evaluate.evaluate(net, store, world=held, loss=loss)
        assert (seen.accuracy is None) == (loss == "mse")
        found.append((result.loss, seen.loss, seen.accuracy or 0.0))
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-4)
    assert found[0][2] == pytest.approx(found[1][2], abs=1e-3)  # a few pixels


def test_a_loss_of_one_s_own_with_a_function_s_targets(world):
    """A loss of two sums, of outputs and targets that a mini-batch function made."""

    def clean(images, labels, at):
        return 255 - images, images[:, :1].astype(np.float32) / 255

    def loss(net, images, targets):
        found = net(images)
        value = dl.mean_squared_error(found, targets) + dl.mean_absolute_error(found, targets)
        return value, dl.mean_squared_error(found, targets)

    agrees_with_the_cpu(world, Paired(60), shades, loss, function=clean)


def wrong(count, where, value):
    store = Paired(count, (), np.int32)
    store.values[where] = value
    return store


@pytest.mark.parametrize("value", [3, -1])
def test_labels_of_no_class_are_told_of(world, value, monkeypatch):
    """Where they lie on the device before a step, else at their mini-batch; as the CPU tells."""
    store, texts = wrong(48, 30, value), []
    monkeypatch.setattr(device_queue, "UPLOADED", 5_000)  # in parts, of which the third has it
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


def test_steps_before_a_wrong_label_are_done(world, monkeypatch):
    monkeypatch.setattr(device_queue, "RESIDENT", 0.0)
    queue = device_queue.DeviceQueue(wrong(48, 30, 7), 24, 0, world, "never")
    gradient = dl.value_and_grad(losses.cross_entropy, reduce=world)
    net = classifier().to(world.device)
    step = StepProgram(net, dl.SGDM(1e-2), gradient, queue.reader(), world.counts)
    (first, _), (second, _) = queue.epoch(0)
    before = step.finish(step.start(first))[0]
    with pytest.raises(ValueError, match="got 0..7"):
        step.start(second)
    assert step.finish(step.start(first))[0] < before
