"""Runs of training: the GPU's beside the CPU's, and byte for byte beside each other.

A run of its own, on as many ranks as a launcher starts: `python -m benchmarks.gpu.training
WHAT`, WHAT as JSON (see `main`).
"""

import importlib
import json
import os
import sys

import numpy as np

from benchmarks import subject
from mpidl.comm import World, failure
from mpidl.data import ArrayDatastore
from mpidl.evaluation import evaluate
from mpidl.nn import zoo
from mpidl.report import Console
from mpidl.training import trainer
from mpidl.training.files import checkpoint, model_file
from mpidl.training.options import training_options

# Losses of the digits' first epoch, by learning rate: how far the GPU's may be from the CPU's,
# relative. Rounding alone makes that of NumPy and of the C kernels differ by 1.6e-6 and 9.3e-5; a
# gradient that is wrong by a hundredth, by 5e-4 at the lower rate. At the recipe's rate, 0.01, each
# rounding grows to a tenth of the loss within 71 iterations, on any two machines: there the mean
# over the epoch is compared, in which those differ by 1 %.
CLOSE = {1e-5: 1e-5, 1e-4: 1e-3}
MEAN = 0.05
# The same of the GPU with TF32 and with float32 products.
CLOSE_TF32 = {1e-5: 5e-3}
LEAST_ACCURACY = 0.995  # of the digit set's test, by its recipe: CPUs reach 0.9990 to 1.0000


def main(argv=None):
    """Train as argv, a JSON object, says, and write the result, {"losses", "sha256"}.

    data: the file of `digits`; options: of training; out: folder of checkpoints, or null; resume:
    whether to go on from the one there; result: the file to write.
    """
    what = json.loads((sys.argv[1:] if argv is None else argv)[0])
    world = World(threads=None)
    train_set, _ = digits(what["data"])
    resume = checkpoint.load(what["out"]) if what["resume"] else None
    found = train(world, network(train_set), train_set, what["options"], what["out"], resume)
    if world.rank == 0:
        with open(what["result"], "w") as file:
            json.dump({"losses": found.losses, "sha256": found.sha256}, file)
    return 0


class Losses(Console):
    """A console that shows nothing, and keeps the loss of each iteration."""

    def __init__(self):
        super().__init__(1)
        self.found = []

    def iteration(self, epoch, iteration, loss, images_per_second, accuracy=None):
        self.found.append(loss)


class Trained:
    """A network that was trained, the loss of each iteration, the images each second."""

    def __init__(self, net, losses, rate):
        self.net, self.losses, self.rate = net, losses, rate
        self.sha256 = model_file.weights_sha256(net)


def train(world, net, train_set, chosen, out=None, resume=None):
    """Trained, by these options, on the world's device or the one that they name."""
    losses = Losses()
    made = training_options.TrainingOptions(**{**zoo.RECIPES["digits"], **chosen})
    result = trainer.train(
        net, train_set, made, world=world, out=out, console=losses, resume=resume
    )
    return Trained(net, losses.found, result.images_per_second)


def network(train_set, seed=0):
    """The digits network for these images."""
    return zoo.digits(train_set.image_shape, len(train_set.classes), seed)


def digits(path):
    """(train_set, test_set) of the digit set, which is drawn where the file is missing."""
    if not os.path.exists(path):
        images, labels = drawn()
        with open(f"{path}.part", "wb") as file:
            np.savez(file, images=images, labels=labels)
        os.replace(f"{path}.part", path)
    with np.load(path) as file:
        store = ArrayDatastore(file["images"], file["labels"], source="digits")
    return store.split(1 - training_options.RUN["test_fraction"], seed=0)


def drawn():
    """(images, labels) of the digit set; `data.digits` is a function of the module's name."""
    return importlib.import_module("mpidl.data.formats.digits").draw()


def small_set(image_shape, count):
    """Random images of ten classes."""
    images, labels = subject.mini_batch(image_shape, count)
    return ArrayDatastore(images, labels, classes=list(range(subject.CLASSES)))


def parity(report, cpu, gpu, sets, epochs, make=network, tf32=True):
    """Compare a GPU's training with the CPU's over an epoch, and see what accuracy it comes to.

    cpu, gpu: worlds of one rank that compute there; sets: (train_set, test_set); epochs: of the
    recipe, for the accuracy; make: of a Network for the images.
    """
    train_set, test_set = sets

    def losses(world, rate, **chosen):
        chosen |= {"epochs": 1, "learning_rate": rate}
        return np.array(train(world, make(train_set), train_set, chosen).losses)

    for rate, most in CLOSE.items():
        own = losses(gpu, rate)
        _compare(report, f"losses at rate {rate:g}: GPU and CPU", own, losses(cpu, rate), most)
        if tf32 and rate in CLOSE_TF32:
            other = losses(gpu, rate, precision="tf32")
            text = f"losses at rate {rate:g}: GPU with TF32 and without"
            _compare(report, text, other, own, CLOSE_TF32[rate])
    rate = zoo.RECIPES["digits"]["learning_rate"]
    means = [float(losses(world, rate).mean()) for world in (gpu, cpu)]
    apart = abs(means[0] / means[1] - 1)
    report.check(
        "mean loss of the first epoch by the recipe: GPU and CPU",
        apart <= MEAN,
        f"{means[0]:.4f} and {means[1]:.4f}, apart by {apart:.1%} (at most {MEAN:.0%})",
    )
    accuracy(report, gpu, sets, epochs, make)


def _compare(report, what, found, expected, most):
    apart = np.abs(found / expected - 1)
    report.check(
        what,
        len(found) == len(expected) and bool(apart.max() <= most),
        f"{len(found)} iterations, {expected[0]:.4f} to {expected[-1]:.4f}: apart by at most "
        f"{apart.max():.1e}, in iteration {apart.argmax() + 1} (at most {most:.0e}); the first by "
        f"{apart[0]:.1e}",
    )


def accuracy(report, world, sets, epochs, make=network):
    """Train by the recipe and see what share of the test images is classified right."""
    train_set, test_set = sets
    trained = train(world, make(train_set), train_set, {"epochs": epochs})
    found = evaluate.evaluate(trained.net, test_set, world=world)
    report.check(
        f"accuracy after {epochs} epochs",
        found.accuracy >= LEAST_ACCURACY,
        f"{found.accuracy:.4f} of {found.images} images (at least {LEAST_ACCURACY}); "
        f"{trained.rate:.0f} images/s; weights_sha256 {trained.sha256}",
    )


if __name__ == "__main__":
    failure.run(main)
