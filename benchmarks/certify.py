"""`python -m benchmarks certify`: measure the cost of a certificate of a training run.

The part `manifest` makes the manifest of a packed set of small images, and of a set of packed JPEG
files. It reads the same images in turns, as an epoch does: once in the order of the set, and once
shuffled. The manifest includes its salts, its root and writing the file. All data are in the
system's file cache, because waiting for a disk would hide the cost.

The part `states` trains networks on one rank, and records states as `--certify` does in every
second epoch. An epoch writes a checkpoint at its end, with a certificate or without. The cost is
the ratio of neighbouring epochs.

The part `audit` is in `certify_audit.py`.
"""

import argparse
import os
import secrets
import tempfile
import time
from typing import Literal

import numpy as np

from benchmarks import input as input_benchmark
from benchmarks import input_memory, machine, report, subject, turns
from benchmarks.certify_audit import measure_audit
from mpidl.certificates import certificate, images, recording
from mpidl.data import Datastore, ImageFolder, MinibatchQueue, PackedDatastore, registry
from mpidl.data.formats import packing
from mpidl.errors import UserError
from mpidl.ranks.world import World
from mpidl.report import Console
from mpidl.training.options import configuration
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.progress import EpochSummary
from mpidl.training.train import train
from mpidl.training.trainer import Trainer

IN_ORDER, SHUFFLED, MANIFEST = "a reading in order", "a reading, shuffled", "manifest"
PLAIN, CERTIFIED = "without a certificate", "with a certificate"
CLASSES = 1000
BATCH = 128  # images per mini-batch of the part `states`


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    if machine.is_launched():
        raise UserError("bench certify measures one rank: run it without mpirun")
    record = {}
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        for part in options.parts:
            record[part] = PARTS[part](options, folder)
    versions = configuration.versions_of("one rank")
    names = ("images", "files", "side", "file_side", "workers", "networks", "iterations", "rounds")
    return report.header(options, versions, *names) | record


def measure_manifest(options: argparse.Namespace, folder: str) -> dict:
    """Measure the manifests of small packed images and of packed JPEG files.

    Returns
    -------
    dict
        By kind of images: seconds of each side, the ratios of the manifest's time to those of the
        readings (medians over rounds), and the bytes of the manifest.
    """
    record, rows = {}, []
    for kind, store in _stores(options, folder).items():
        times, size = _measure(options, store, os.path.join(folder, certificate.MANIFEST))
        ratios = {
            side: report.median(np.divide(times[MANIFEST], times[side]))
            for side in (IN_ORDER, SHUFFLED)
        }
        record[kind] = {"seconds": times, "ratios": ratios, "bytes": size}
        print(
            f"{kind}, in {options.rounds} rounds; the manifest has {size / 1e6:.1f} MB, and takes "
            f"{ratios[IN_ORDER]:.2f} times as long as {IN_ORDER}, {ratios[SHUFFLED]:.2f} times as "
            f"long as {SHUFFLED}"
        )
        rows += [[f"  {side}", report.spread(times[side]), "s"] for side in times]
        report.print_table(rows, left=1)
        rows.clear()
    return record


def _stores(options, folder):
    """Write the packed sets, and return {description: datastore}."""
    small = input_memory.RepeatedImages(options.side, options.images, CLASSES)
    input_benchmark.draw(folder, options.file_side, options.files, ["jpeg"])
    files = ImageFolder(os.path.join(folder, "jpeg"))
    stores: dict[str, Datastore] = {}
    kinds: dict[Literal["decoded", "encoded"], Datastore] = {"decoded": small, "encoded": files}
    for kind, store in kinds.items():
        path = os.path.join(folder, f"{kind}.h5")
        packing.pack({"train": store}, path, images=kind)
        size = "x".join(map(str, store.image_shape))
        stores[f"{len(store)} {kind} images of {size}"] = PackedDatastore(path)
    return stores


def _measure(options, store, path):
    """Return {side: seconds of each round} and the bytes of the manifest at `path`."""
    salt = secrets.token_bytes(images.SIZE)

    def read(shuffle):
        queue = MinibatchQueue(store, 128, shuffle=shuffle, workers=options.workers)
        for pixels, labels in queue.epoch(1):
            del pixels, labels

    def write():
        digests = images.digests(store, None, salt, "train", workers=options.workers)
        images.describe(store, digests)
        images.write_manifest(path, {"train": digests})

    sides = {
        IN_ORDER: lambda: read("never"),
        SHUFFLED: lambda: read("every-epoch"),
        MANIFEST: write,
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number, side in turns.alternate(sides, options.rounds + 1):
        seconds = turns.seconds(sides[side])
        if number:  # the first round brings the files into the system's cache
            times[side].append(seconds)
    return times, os.path.getsize(path)


class Turns(recording.Recorder):
    """The recorder of a certificate, which records only in every second epoch.

    A turn begins at the end of an epoch, with its state and its checkpoint, and ends after the last
    mini-batch of the next epoch. The first turn is not measured.

    Attributes
    ----------
    seconds, processor_seconds : dict
        {PLAIN or CERTIFIED: time of each turn}
    recording_seconds : list of float
        Seconds of each certified turn that the recorder itself took.
    """

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.kinds = [PLAIN, *(kind for _, kind in turns.alternate((PLAIN, CERTIFIED), rounds))]
        self.seconds: dict[str, list[float]] = {PLAIN: [], CERTIFIED: []}
        self.processor_seconds: dict[str, list[float]] = {PLAIN: [], CERTIFIED: []}
        self.recording_seconds: list[float] = []
        self.turn, self.start_times = 0, (0.0, 0.0)

    def step(self, trainer: Trainer) -> None:
        """Record a state if this turn records and the state is due."""
        if self.kinds[self.turn] == CERTIFIED:
            self.recording_seconds[-1] += turns.seconds(lambda: super(Turns, self).step(trainer))

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        """End a turn, and begin the next one."""
        times = time.perf_counter(), time.process_time()
        if self.turn:
            seconds, processor_seconds = np.subtract(times, self.start_times)
            self.seconds[self.kinds[self.turn]].append(seconds)
            self.processor_seconds[self.kinds[self.turn]].append(processor_seconds)
        self.turn, self.start_times = self.turn + 1, times
        if self.turn < len(self.kinds) and self.kinds[self.turn] == CERTIFIED:
            seconds = turns.seconds(lambda: super(Turns, self).epoch(trainer, summary))
            self.recording_seconds.append(seconds)

    def end(self, trainer: Trainer) -> None:
        """Write no certificate, because states are missing."""


def measure_states(options: argparse.Namespace, folder: str) -> dict:
    """Measure epochs of networks with and without states.

    Returns
    -------
    dict
        By network: seconds of the epochs, the ratio of neighbouring epochs, the share of an epoch
        that the recorder takes, and the seconds of the start with the digests of the images.
    """
    record = {}
    for name in options.networks:
        hook = Turns(options.rounds)
        net = subject.network(name)
        world = World(threads=len(os.sched_getaffinity(0)))
        count = options.iterations * BATCH
        store: Datastore = input_memory.RepeatedImages(net.input_shape[1], count, subject.CLASSES)
        if name == "digits":
            store = registry.open_sets("digits", world).train
        epochs = len(hook.kinds)
        settings = TrainingOptions(epochs=epochs, batch_size=BATCH, plots="none", verbose="off")
        out = os.path.join(folder, f"run-{name}")
        console = Console(world.rank, progress=False)
        train(net, store, settings, world=world, console=console, out=out, hooks=[hook])
        record[name] = _describe_states(name, hook)
    return record


def _describe_states(name, hook):
    """Print the cost of the states of a network, and return it for the JSON file."""
    seconds, processor = hook.seconds, hook.processor_seconds
    record = {
        "seconds": seconds,
        "ratio": report.median(np.divide(seconds[CERTIFIED], seconds[PLAIN])),
        "processor_ratio": report.median(np.divide(processor[CERTIFIED], processor[PLAIN])),
        "share": report.median(np.divide(hook.recording_seconds, seconds[CERTIFIED])),
    }
    print(
        f"{name}, mini-batches of {BATCH}: an epoch {CERTIFIED} takes {record['ratio']:.4f} times "
        f"as long as one {PLAIN}, and {record['processor_ratio']:.4f} times the processor time; "
        f"its states take {100 * record['share']:.2f} % of it"
    )
    report.print_table([[f"  {s}", report.spread(seconds[s]), "s"] for s in seconds], left=1)
    return record


PARTS = {"manifest": measure_manifest, "states": measure_states, "audit": measure_audit}
