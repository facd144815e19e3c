"""`python -m benchmarks transfer`: measure how many epochs and images pretraining saves.

A network learns the first half of the classes of a data set from all images of these classes. For
each number of images per class, two networks then learn the other half of the classes. One network
starts from the pretrained weights with a new last layer, the other network from initial weights.
Both networks see the same images in the same order, for the same number of epochs. Each network
uses the learning rate with its highest median accuracy over the seeds. The accuracy on test images
is measured after each epoch.
"""

import argparse
from typing import Any

import numpy as np

from benchmarks import machine, report
from mpidl import data
from mpidl.data import ArrayDatastore
from mpidl.errors import UserError
from mpidl.nn import zoo
from mpidl.nn.transfer import transfer
from mpidl.ranks.world import World
from mpidl.training.options import configuration
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.train import train

SIDES = ("pretrained", "initial weights")
RATES = (0.001, 0.003, 0.01, 0.03)  # learning rates that are tried for each network
NEW_LAYER_FACTOR = 10.0
QUIET: dict[str, Any] = {"plots": "none", "verbose": "off", "verbose_every": 0}


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    machine.refuse_launcher("transfer")
    world = World()
    first_half, images, test = load_halves(options.data, options.test_images)
    print(
        f"{options.data}: pretrained on {', '.join(first_half.classes)} ({len(first_half)} images, "
        f"{options.pretraining_epochs} epochs), then {', '.join(images.classes)}; {len(test)} test "
        f"images, {options.epochs} epochs, medians of {options.seeds} seed(s)",
        flush=True,
    )
    curves: dict[tuple[int, str, float], list[list[float]]] = {}
    for seed in range(options.seeds):
        pretrained = zoo.digits(images.image_shape, len(first_half.classes), seed=seed)
        recipe = TrainingOptions.from_recipe(
            "digits", epochs=options.pretraining_epochs, seed=seed, **QUIET
        )
        check_end(train(pretrained, first_half, recipe, world=world))
        for per_class in options.per_class:
            few, _ = images.split(per_class / np.bincount(images.labels).max(), seed=seed)
            for side in SIDES:
                for rate in RATES:
                    net = zoo.digits(images.image_shape, len(images.classes), seed=seed)
                    if side == "pretrained":
                        net = transfer(
                            pretrained,
                            images.classes,
                            new_layer_factor=NEW_LAYER_FACTOR,
                            seed=seed,
                        )
                    curve = accuracies(net, few, test, options, rate, seed, world)
                    curves.setdefault((per_class, side, rate), []).append(curve)
    names = ("data", "seeds", "epochs", "pretraining_epochs", "batch_size", "test_images")
    record = report.header(options, configuration.versions_of("none"), *names)
    return record | {"results": summarize(curves, options, len(images.classes))}


def load_halves(path, count):
    """Return the images of the first half of the classes, of the second half, and test images."""
    images, test = data.open_data(path)
    if test is None:
        images, test = images.split(0.8)
    middle = len(images.classes) // 2
    if middle < 2:
        raise UserError(f"--data {path}: expected at least 4 classes, found {len(images.classes)}")
    rest = (middle, len(images.classes))
    test = half(test, *rest)
    if count < len(test):
        test, _ = test.split(count / len(test))
    return half(images, 0, middle), half(images, *rest), test


def half(images, first, stop):
    """Return the images of the classes from `first` to `stop - 1`, in memory."""
    (indices,) = np.nonzero((images.labels >= first) & (images.labels < stop))
    labels = images.labels[indices] - first
    return ArrayDatastore(images.read(indices), labels, images.classes[first:stop])


def accuracies(net, images, test, options, rate, seed, world):
    """Train a network and return the accuracy on the test images after each epoch."""
    curve = []

    def watch(info):
        if info.state == "epoch":
            curve.append(info.validation_accuracy)

    settings = TrainingOptions(
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=rate,
        shuffle="every-epoch",
        seed=seed,
        validation=test,
        validation_frequency=0,
        batchnorm_statistics="moving",
        output_functions=[watch],
        **QUIET,
    )
    check_end(train(net, images, settings, world=world))
    return curve


def check_end(result):
    """Raise UserError if a signal ended a training run early."""
    if result.stopped:
        raise UserError(f"{result.stopped}: stopped")


def summarize(curves, options, classes):
    """Print a table of medians over the seeds, and return its rows for the JSON file."""
    targets = [f"epochs, images to {accuracy:g}" for accuracy in options.accuracies]
    table, rows = [["images per class", "weights", "rate", *targets, "accuracy at the end"]], []
    for per_class in options.per_class:
        for side in SIDES:
            finals = {
                rate: report.median([curve[-1] for curve in curves[per_class, side, rate]])
                for rate in RATES
            }
            rate = max(finals, key=finals.get)
            best = curves[per_class, side, rate]
            epochs = {
                f"{accuracy:g}": [first_epoch(curve, accuracy) for curve in best]
                for accuracy in options.accuracies
            }
            finals = [curve[-1] for curve in best]
            cells = [duration(counts, per_class * classes) for counts in epochs.values()]
            table.append([per_class, side, f"{rate:g}", *cells, report.spread(finals, 1, 4)])
            sides = {"per_class": per_class, "weights": side, "learning_rate": rate}
            rows.append(sides | {"accuracy": finals, "epochs_to": epochs, "curves": best})
    report.print_table(table, left=2)
    return rows


def first_epoch(curve, accuracy):
    """Return the first epoch that reached an accuracy, counted from 1, or None."""
    return next((i for i, value in enumerate(curve, 1) if value >= accuracy), None)


def duration(epochs, images):
    """Format the median number of epochs, and the number of images in these epochs."""
    median = report.median([np.inf if count is None else count for count in epochs])
    return "not reached" if median == np.inf else f"{median:g}, {median * images:.0f}"
