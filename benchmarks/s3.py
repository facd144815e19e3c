"""`python -m benchmarks s3`: time epochs of training from an object store and from local files.

Both sides train the same network on the same image files in one process, epoch by epoch in turns.
The benchmark times the first epoch, which reads all files, and the second, whose images are in the
node's cache. A third side reads the second epoch's files from the folder of `--cache-dir`, without
the node's cache. The store also needs time on the cores if it runs on the same machine.
"""

import argparse
import os
import tempfile
import time

import numpy as np

from benchmarks import input as input_files
from benchmarks import machine, report, subject, turns
from benchmarks.mpidl_step import EagerStep
from mpidl.comm import World
from mpidl.data import ImageFolder, MinibatchQueue, NodeCache, configure_storage
from mpidl.data.storage import paths, settings, store
from mpidl.errors import UserError
from mpidl.training.options import configuration

EPOCHS = ("first", "second", "second, --cache-dir")


def main(options: argparse.Namespace) -> dict:
    """Run the sub-command and return its record."""
    if machine.is_launched():
        raise UserError("bench s3 is one process: run it without mpirun")
    if not settings.is_remote(options.url or ""):
        raise UserError("--url: expected a prefix to write to, such as s3://bucket/prefix")
    notes = subject.configure(options)
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        configure_storage(requests=options.requests)
        input_files.draw(folder, options.side, options.images, options.kinds)
        local = os.path.join(folder, options.kinds[0])
        upload(local, options.url)
        text = f"{options.images} {options.kinds[0]} images of 3x{options.side}x{options.side}, "
        text += f"{options.requests} requests at a time, {machine.arithmetic()}, "
        text += f"{options.rounds} rounds in turns"
        subject.print_head(options, text, notes)
        figures = measure(options, local, os.path.join(folder, "cache"))
    names = ("side", "images", "batch_size", "threads", "network", "seed", "requests")
    return report.header(options, configuration.versions_of("one rank"), *names) | figures


def upload(folder: str, url: str) -> None:
    """Copy the files of a folder to a store, unless they are there with the same sizes."""
    with paths.listed(url):
        for name in sorted(os.listdir(folder)):
            for file in sorted(os.listdir(os.path.join(folder, name))):
                path, target = os.path.join(folder, name, file), f"{url}/{name}/{file}"
                if paths.is_file(target) and paths.stamp_of(target).size == os.path.getsize(path):
                    continue
                with open(path, "rb") as source:
                    store.store_of(target).write(target, source.read())


def measure(options: argparse.Namespace, local: str, cache_dir: str) -> dict:
    """Time epochs from both sources.

    Returns
    -------
    dict
        By epoch, summaries of the seconds from "local" files and from the "store", and "ratio",
        the median over the rounds of store / local.
    """
    shape = (3, options.side, options.side)
    step = EagerStep(subject.network(options.network, shape), None, World(threads=options.threads))
    times: dict = {epoch: {"local": [], "store": []} for epoch in EPOCHS}
    for number, side in turns.alternate(("local", "store"), options.rounds + 1):
        source = local if side == "local" else options.url
        configure_storage(requests=options.requests)
        cached = NodeCache(ImageFolder(source), budget_bytes=options.cache_mb * 10**6)
        seconds = [_epoch(step, cached, options, epoch) for epoch in range(2)]
        configure_storage(requests=options.requests, cache_dir=cache_dir)
        files = ImageFolder(source)
        if side == "store":
            files.read(np.arange(len(files)))  # fills the folder in the first round
        seconds.append(_epoch(step, files, options, 2))
        if number:  # the first round warms up
            for epoch, value in zip(EPOCHS, seconds, strict=True):
                times[epoch][side].append(value)
    rows = [["epoch, s", "local files", "store", "store / local"]]
    figures = {}
    for epoch, by_side in times.items():
        ratio = report.median(np.array(by_side["store"]) / np.array(by_side["local"]))
        figures[epoch] = {side: report.summary(values) for side, values in by_side.items()}
        figures[epoch]["ratio"] = ratio
        rows.append([epoch, *map(report.spread, by_side.values()), f"{ratio:.3f}"])
    report.print_table(rows)
    return figures


def _epoch(step, datastore, options, epoch):
    """Train for one epoch and return its seconds."""
    queue = MinibatchQueue(datastore, options.batch_size, workers=options.workers[0])
    start = time.perf_counter()
    for images, labels in queue.epoch(epoch):
        step(images, labels)
        del images, labels
    return time.perf_counter() - start
