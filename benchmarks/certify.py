"""`python -m benchmarks certify`: measure the cost of a certificate of a training run.

The part `manifest` makes the manifest of a packed set of small images, and of a set of packed JPEG
files. It reads the same images in turns, as an epoch does: once in the order of the set, and once
shuffled. The manifest includes its salts, its root and writing the file. All data are in the
system's file cache, because waiting for a disk would hide the cost.
"""

import argparse
import os
import secrets
import tempfile
from typing import Literal

import numpy as np

from benchmarks import input as input_benchmark
from benchmarks import input_memory, machine, report, turns
from mpidl.certificates import certificate, images
from mpidl.data import Datastore, ImageFolder, MinibatchQueue, PackedDatastore
from mpidl.data.formats import packing
from mpidl.errors import UserError
from mpidl.training.options import configuration

IN_ORDER, SHUFFLED, MANIFEST = "a reading in order", "a reading, shuffled", "manifest"
CLASSES = 1000


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    if machine.is_launched():
        raise UserError("bench certify measures one rank: run it without mpirun")
    record = {}
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        for part in options.parts:
            record[part] = PARTS[part](options, folder)
    versions = configuration.versions_of("one rank")
    names = ("images", "files", "side", "file_side", "workers", "rounds")
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


PARTS = {"manifest": measure_manifest}
