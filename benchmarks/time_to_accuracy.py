"""`python -m benchmarks time_to_accuracy`: time training to an accuracy, alternately with PyTorch.

Both sides use the same recipe: the network and its initial weights, the learning rate of each
iteration, Nesterov momentum, label smoothing, the moving average of the weights, and the random
changes of images. The sides draw different random numbers, so the accuracies differ slightly.
PyTorch's variants first take a few steps, and the fastest variant trains.

A training ends after the epoch in which the accuracy on the test images is reached. The time
excludes reading the data, statistics, compilation and tests.
"""

import argparse
import json
import sys
import tempfile
import time
from typing import Any

from benchmarks import machine, report, subject, torch_step, turns
from mpidl import data
from mpidl.errors import Fault
from mpidl.evaluation import evaluate
from mpidl.launcher import environment
from mpidl.nn import zoo
from mpidl.ranks import failure
from mpidl.ranks.world import World
from mpidl.training.options import configuration
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.train import train

PATIENCE = 3600.0  # maximum duration of a training run in seconds
QUIET: dict[str, Any] = {"plots": "none", "verbose": "off", "verbose_every": 0}
TASK = ("network", "data", "epochs", "threads", "precision", "accuracy", "seed")


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    machine.refuse_launcher("time_to_accuracy")
    torch_step.require("time_to_accuracy")
    cores = machine.cores_of(1, options.threads)[0]
    print(
        f"{options.network}, {options.data}, {options.precision}, {options.threads} thread(s) on "
        f"cores {cores}, "
        f"schedule of {options.epochs} epochs, until the accuracy is {options.accuracy:g}",
        flush=True,
    )
    results: dict[str, list[dict[str, Any]]] = {"ours": [], "torch": []}
    with (
        tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder,
        _side("ours", "benchmarks.time_to_accuracy", options, cores, folder) as ours,
        _side("torch", "benchmarks.torch_training", options, cores, folder) as torch,
    ):
        sides = {"ours": ours, "torch": torch}
        descriptions = {name: side.ask("describe")[0] for name, side in sides.items()}
        variants = torch.ask("variants", options.variants)[0]
        for name, seconds in variants["seconds"].items():
            print(f"PyTorch, {name}: {seconds * 1e3:.1f} ms per step", flush=True)
        for name, reason in variants["failed"].items():
            print(f"PyTorch, {name}: failed: {reason}", flush=True)
        for number in range(options.rounds):
            for name, side in sides.items():
                result = side.ask("training", options.seed + number)[0]
                results[name].append(result)
                print(f"round {number + 1}, {name}: {describe(result)}", flush=True)
    versions = descriptions["ours"]["versions"] | descriptions["torch"]["versions"]
    record = report.header(options, versions, *TASK, "rounds", "variants")
    return record | {"torch_variants": variants, "results": results} | summarize(results)


def _side(name, module, options, cores, folder):
    """Start the process of a side."""
    entries = {key: getattr(options, key) for key in TASK} | {"cores": [cores]}
    command = [sys.executable, "-m", module, json.dumps(entries)]
    return turns.Side(name, [command], 1, environment(), folder, PATIENCE)


def describe(result: dict[str, Any]) -> str:
    """Describe the result of a training run in words."""
    curve = ", ".join(f"{accuracy:.4f}" for accuracy in result["accuracies"])
    time_text = "not reached" if result["seconds"] is None else f"{result['seconds']:.1f} s"
    return f"{time_text}; {result['images_per_second']:.0f} images/s; accuracies {curve}"


def summarize(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Print the ratio of the times, and return the figures for the JSON file.

    Raises
    ------
    Fault
        If a training run has not reached the accuracy.
    """
    times = {name: [result["seconds"] for result in side] for name, side in results.items()}
    if any(seconds is None for side in times.values() for seconds in side):
        raise Fault("a training has not reached the accuracy: more --epochs would reach it")
    ratio = report.median(times["torch"]) / report.median(times["ours"])
    speeds = {
        name: report.median([result["images_per_second"] for result in side])
        for name, side in results.items()
    }
    speed_ratio = speeds["ours"] / speeds["torch"]
    print(
        f"ours {report.spread(times['ours'], digits=1)} s, PyTorch "
        f"{report.spread(times['torch'], digits=1)} s: ratio {ratio:.2f} of the times, "
        f"{speed_ratio:.2f} of the images per second"
    )
    return {"ratio": ratio, "speed_ratio": speed_ratio}


# our side


def open_images(path: str) -> tuple[Any, Any]:
    """Return the training images and the test images of a data set."""
    images, test = data.open_data(path)
    return (images, test) if test is not None else images.split(0.9, seed=0)


def recipe(job: argparse.Namespace, seed: int) -> TrainingOptions:
    """Return the options of both sides. All mini-batches are full, so PyTorch compiles once."""
    return TrainingOptions.from_recipe(
        job.network,
        epochs=job.epochs,
        seed=seed,
        threads=job.threads,
        precision=job.precision,
        partial_minibatch="discard",
        **QUIET,
    )


class Clock:
    """Hook that measures the time and the accuracy of each epoch, without the time of the tests."""

    def __init__(self, test, accuracy: float) -> None:
        self.test, self.accuracy = test, accuracy
        self.accuracies: list[float] = []
        self.seconds, self.images = 0.0, 0

    def start(self, trainer) -> None:
        """Start the clock before the first iteration."""
        self._start = time.perf_counter()

    def epoch(self, trainer, summary) -> None:
        """Measure the accuracy, and end the training if it is high enough."""
        self.seconds += time.perf_counter() - self._start
        self.images = trainer.position.all_images
        flips = trainer.options.test_flips
        net = trainer.average.network(trainer.net)
        evaluation = evaluate.evaluate(net, self.test, world=trainer.world, test_flips=flips)
        self.accuracies.append(evaluation.accuracy)
        if evaluation.accuracy >= self.accuracy:
            trainer.stop()
        self._start = time.perf_counter()

    def result(self) -> dict[str, Any]:
        """Return the result of the training, in the form that `describe` takes."""
        is_reached = self.accuracies[-1] >= self.accuracy
        return {
            "seconds": self.seconds if is_reached else None,
            "images_per_second": self.images / self.seconds,
            "accuracies": self.accuracies,
        }


def serve_ours(job: argparse.Namespace, address: str) -> int:
    """Serve the requests of the benchmark until it ends (see `turns`); return the exit code."""
    world = World()
    images, test = open_images(job.data)

    def describe():
        return {"versions": configuration.versions_of("none"), "arithmetic": machine.arithmetic()}

    def training(seed):
        net = zoo.NETWORKS[job.network](images.image_shape, len(images.classes), seed)
        clock = Clock(test, job.accuracy)
        train(net, images, recipe(job, seed), world=world, hooks=[clock])
        return clock.result()

    turns.serve(address, 0, describe, training)
    return 0


if __name__ == "__main__":
    failure.run(lambda: serve_ours(*subject.join(None, 0)))
