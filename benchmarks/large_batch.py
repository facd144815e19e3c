"""`python -m benchmarks large_batch`: measure the accuracy at several batch sizes.

All runs see the same images for the same number of epochs. The batch size determines the
options in `SETTINGS`, which docs/large-batches.md explains. The rest is always the same: the digits
network, its initial weights, and a cosine schedule.
"""

import argparse
import statistics
from typing import Any

from benchmarks import machine, report
from mpidl import data
from mpidl.errors import Fault, UserError
from mpidl.evaluation import evaluate
from mpidl.nn import zoo
from mpidl.ranks.world import World
from mpidl.training.options import configuration
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.train import train

SHARED: dict[str, Any] = {
    "learn_rate_schedule": "cosine",
    "plots": "none",
    "verbose": "off",
    "verbose_every": 0,
}
SCALED = {"learning_rate": 0.01, "linear_scaling": 128}
LAMB = {"solver": "lamb", "warmup_iterations": 5}
SETTINGS: dict[int, dict[str, Any]] = {
    128: {"learning_rate": 0.01},
    512: SCALED,
    2048: LAMB | {"learning_rate": 0.05},
    8192: LAMB | {"learning_rate": 0.05},
}


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    machine.refuse_launcher("large_batch")
    unknown = [size for size in options.batch_sizes if size not in SETTINGS]
    if unknown:
        sizes = ", ".join(map(str, SETTINGS))
        raise UserError(f"--batch-sizes {unknown[0]}: expected some of {sizes}")
    world = World()
    images, test = data.open_data(options.data, world)
    if test is None:
        images, test = images.split(0.9, seed=0)
    print(
        f"{options.data}: {len(images)} images, {options.epochs} epochs, {len(test)} test images, "
        f"{machine.arithmetic()}, medians of {options.seeds} seed(s)",
        flush=True,
    )
    accuracies: dict[int, float] = {}
    rows = [["batch size", "iterations", "options", "accuracy", "difference"]]
    for size in options.batch_sizes:
        results = [
            _measure(images, test, size, options.epochs, s, world) for s in range(options.seeds)
        ]
        accuracies[size] = statistics.median(accuracy for accuracy, _ in results)
        text = ", ".join(f"{name} {value}" for name, value in SETTINGS[size].items())
        difference = accuracies[size] - accuracies[options.batch_sizes[0]]
        row = [size, results[0][1], text, f"{accuracies[size]:.4f}", f"{difference:+.4f}"]
        rows.append(list(map(str, row)))
        print(f"{size}: {accuracies[size]:.4f}", flush=True)
    report.print_table(rows, left=3)
    versions = configuration.versions_of("none")
    record = report.header(options, versions, "data", "epochs", "seeds", "batch_sizes")
    return record | {"accuracies": accuracies}


def _measure(images, test, size, epochs, seed, world):
    """Train, and return the accuracy on the test images and the number of iterations."""
    net = zoo.digits(images.image_shape, len(images.classes), seed=seed)
    options = {**SHARED, **SETTINGS[size], "batch_size": size, "epochs": epochs, "seed": seed}
    result = train(net, images, TrainingOptions(**options), world=world)
    if result.stopped:
        raise Fault(f"large_batch: the training ended early: {result.stopped}")
    return evaluate.evaluate(net, test, world=world).accuracy, result.iterations
