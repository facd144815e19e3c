"""Train on the GPU, compare the losses with the CPU's, and compare weights byte for byte.

`python -m benchmarks.gpu.training TASK` trains one or more times, on any number of ranks. TASK is
a JSON object (see `main`).
"""

import importlib
import json
import os
import sys
from typing import NamedTuple

import numpy as np

from benchmarks import subject
from mpidl.cli import start
from mpidl.data import ArrayDatastore
from mpidl.evaluation import evaluate
from mpidl.files import write_whole
from mpidl.nn import Network, zoo
from mpidl.ranks import failure
from mpidl.ranks.world import World
from mpidl.report import Console
from mpidl.training.files import checkpoint, model_file
from mpidl.training.options.run_inputs import RunInputs
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.train import train as train_network

# Largest relative differences between the GPU's and the CPU's losses in the first epoch of the
# digits, by learning rate. Rounding alone makes the losses of NumPy and of the C kernels differ by
# 1.6e-6 at the lower rate and by 9.3e-5 at the higher rate. A gradient error of 1 % changes the
# losses by 5e-4 at the lower rate. At the recipe's rate, 0.01, the effect of rounding grows to a
# tenth of the loss within 71 iterations on any two machines. At that rate, the check compares the
# mean losses of the epoch, which differ by about 1 %.
TOLERANCES = {1e-5: 1e-5, 1e-4: 1e-3}
MEAN_TOLERANCE = 0.05
# between precisions and fp32 on the GPU, at the lower rate
TOLERANCES_ROUNDED = {"tf32": 5e-3, "bf16": 5e-3}
MIN_ACCURACY = 0.995  # on the digits' test images; CPUs reach 0.9990 to 1.0000


def main(argv=None):
    """Run the trainings that `argv` describes, one after another, and return the exit code.

    `argv` has a JSON object with these entries: "data" is the file for `load`, "network" a value
    of `--network`, and "runs" a list of trainings. Each has these entries: "options" are training
    options, "out" is the folder of checkpoints or null, "resume" says whether to continue from the
    checkpoint in "out", and "result" is the output file for {"losses", "sha256"}, which is written
    when the training ends.
    """
    task = json.loads((sys.argv[1:] if argv is None else argv)[0])
    world = World(threads=None)
    train_set, _ = load(task["data"])
    for job in task["runs"]:
        out = job["out"]
        resume = checkpoint.load(out) if job["resume"] else None
        run = train(
            world, network(train_set, task["network"]), train_set, job["options"], out, resume
        )
        if world.rank == 0:
            result = {"losses": run.losses, "sha256": run.sha256}
            write_whole(job["result"], json.dumps(result).encode())
    return 0


class LossRecorder(Console):
    """A console that shows nothing and records the loss of each iteration."""

    def __init__(self):
        super().__init__(1)
        self.losses = []

    def iteration(self, epoch, iteration, loss, images_per_second, accuracy=None):
        """Append the loss to `losses`."""
        self.losses.append(loss)


class TrainedRun(NamedTuple):
    """A trained network, the loss of each iteration, and images per second."""

    net: Network
    losses: list
    rate: float

    @property
    def sha256(self):
        """SHA-256 hash of the weights."""
        return model_file.weights_sha256(self.net)


def train(world, net, train_set, options, out=None, resume=None):
    """Train with the recipe of the digits network and these options. Return the TrainedRun.

    The training runs on the world's device, unless the options name another device.
    """
    recorder = LossRecorder()
    training = TrainingOptions(**{**zoo.RECIPES["digits"], **options})
    result = train_network(
        net, train_set, training, world=world, out=out, console=recorder, resume=resume
    )
    return TrainedRun(net, recorder.losses, result.images_per_second)


def network(train_set, name="digits"):
    """Return the network that `--network` names for the images of a data set."""
    return start.network(name, train_set.image_shape, len(train_set.classes), 0)


def load(path, small=False):
    """Load images from a file and split them into training and test set.

    If the file is missing, write it first: the digits or, if `small`, `bright_rows`.
    """
    if not os.path.exists(path):
        images, labels = bright_rows() if small else draw_digits()
        with open(f"{path}.part", "wb") as file:
            np.savez(file, images=images, labels=labels)
        os.replace(f"{path}.part", path)
    with np.load(path) as file:
        store = ArrayDatastore(file["images"], file["labels"], source="digits")
    return store.split(1 - RunInputs.test_fraction, seed=0)


def bright_rows(count=60, side=8, classes=3):
    """Return images of noise whose class is a bright row, and their labels."""
    images = np.random.default_rng(0).integers(0, 100, (count, 1, side, side), np.uint8)
    labels = np.arange(count) % classes
    images[np.arange(count), 0, 1 + 2 * labels] = 255
    return images, labels


def draw_digits():
    """Draw the digits; return their images and labels."""
    # the name `data.digits` is a function, not this module
    return importlib.import_module("mpidl.data.formats.digits").draw()


def small_set(image_shape, count):
    """Return a data set of `count` random images in ten classes."""
    images, labels = subject.mini_batch(image_shape, count)
    return ArrayDatastore(images, labels, classes=list(range(subject.CLASSES)))


def parity(report, cpu, gpu, sets, epochs, make=network, options=None):
    """Compare an epoch of training on the GPU and on the CPU, and check the GPU's final accuracy.

    Trainings in TF32 and in bfloat16 are compared with the GPU's training in float32.

    Parameters
    ----------
    report : Report
        Receives the checks.
    cpu, gpu : World
        Worlds of one rank that compute on the CPU and on the GPU.
    sets : tuple of Datastore
        Training and test set.
    epochs : int
        Number of epochs before the accuracy is measured.
    make : callable
        Returns a Network for a data set.
    options : dict or None
        Training options that replace those of the recipe.
    """
    train_set, test_set = sets
    recipe = options or {}

    def losses(world, rate, **options):
        options = {**recipe, **options, "epochs": 1, "learning_rate": rate}
        return np.array(train(world, make(train_set), train_set, options).losses)

    for rate, tolerance in TOLERANCES.items():
        gpu_losses = losses(gpu, rate)
        name = f"losses at rate {rate:g}: GPU and CPU"
        compare(report, name, gpu_losses, losses(cpu, rate), tolerance)
        for precision, largest in TOLERANCES_ROUNDED.items():
            if rate > min(TOLERANCES):
                continue
            rounded_losses = losses(gpu, rate, precision=precision)
            name = f"losses at rate {rate:g}: GPU in {precision} and in fp32"
            compare(report, name, rounded_losses, gpu_losses, largest)
    rate = zoo.RECIPES["digits"]["learning_rate"]
    means = [float(losses(world, rate).mean()) for world in (gpu, cpu)]
    difference = abs(means[0] / means[1] - 1)
    report.check(
        "mean loss of the first epoch by the recipe: GPU and CPU",
        difference <= MEAN_TOLERANCE,
        f"{means[0]:.4f} and {means[1]:.4f}, which differ by {difference:.1%} (at most "
        f"{MEAN_TOLERANCE:.0%})",
    )
    for precision in ("fp32", "bf16"):
        accuracy(report, gpu, sets, recipe | {"epochs": epochs, "precision": precision}, make)


def compare(report, name, losses, expected, tolerance):
    """Check that losses equal the expected ones within the relative `tolerance`."""
    differences = np.abs(losses / expected - 1)
    report.check(
        name,
        len(losses) == len(expected) and bool(differences.max() <= tolerance),
        f"{len(losses)} iterations, {expected[0]:.4f} to {expected[-1]:.4f}: they differ by at "
        f"most {differences.max():.1e}, in iteration {differences.argmax() + 1} (at most "
        f"{tolerance:.0e}); the first by {differences[0]:.1e}",
    )


def accuracy(report, world, sets, options, make=network):
    """Train with the recipe and these options, and check the accuracy on the test images."""
    train_set, test_set = sets
    run = train(world, make(train_set), train_set, options)
    evaluation = evaluate.evaluate(run.net, test_set, world=world)
    report.check(
        f"accuracy after {options['epochs']} epochs in {options['precision']}",
        evaluation.accuracy >= MIN_ACCURACY,
        f"{evaluation.accuracy:.4f} of {evaluation.images} images (at least {MIN_ACCURACY}); "
        f"{run.rate:.0f} images/s; weights_sha256 {run.sha256}",
    )


if __name__ == "__main__":
    failure.run(main)
