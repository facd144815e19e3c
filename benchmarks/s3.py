"""`python -m benchmarks s3`: time epochs of training from an object store and from local files.

Both sides train the same network on the same image files in one process, and alternate epochs. The
benchmark times the first epoch, which reads all files, and the second epoch, whose images are in
the node's cache. A third side reads the files of the second epoch from the folder of `--cache-dir`,
without the node's cache. If the store runs on the same machine, it uses the same cores.
"""

import argparse
import os
import tempfile
import time

import numpy as np

from benchmarks import input as input_files
from benchmarks import machine, report, subject
from benchmarks.mpidl_step import EagerStep
from mpidl.data import ImageFolder, MinibatchQueue, NodeCache, configure_storage, paths
from mpidl.data.storage import store
from mpidl.data.urls import is_remote
from mpidl.errors import UserError
from mpidl.ranks.world import World
from mpidl.training.options import configuration

EPOCHS = ("first", "second", "second, --cache-dir")


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    if machine.is_launched():
        raise UserError("bench s3 is one process: run it without mpirun")
    if not is_remote(options.url or ""):
        raise UserError("--url: expected a prefix to write to, such as s3://bucket/prefix")
    notes = subject.configure(options)
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        _configure(options)
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
    """Copy the files of a folder to a store, except files that exist there with the same size."""
    with paths.listed(url):
        for name in sorted(os.listdir(folder)):
            for file in sorted(os.listdir(os.path.join(folder, name))):
                path, target = os.path.join(folder, name, file), f"{url}/{name}/{file}"
                if paths.is_file(target) and paths.stamp_of(target).size == os.path.getsize(path):
                    continue
                with open(path, "rb") as source:
                    store.store_of(target).write(target, source.read())


def measure(options: argparse.Namespace, local: str, cache_dir: str) -> dict:
    """Time epochs from both sources. The two epochs of a source follow each other.

    Returns
    -------
    dict
        By epoch: summaries of the seconds from "local" files and from the "store"; "ratio", the
        median over the rounds of store / local; and "processor", the same ratio of processor times
        of this process, which are less disturbed by other programs on the machine.
    """
    shape = (3, options.side, options.side)
    step = EagerStep(subject.network(options.network, shape), None, World(threads=options.threads))
    sources = {"local": local, "store": options.url}
    times: dict = {epoch: {side: [] for side in sources} for epoch in EPOCHS}
    _configure(options, cache_dir)
    files = ImageFolder(options.url)
    files.read(np.arange(len(files)))  # fills the folder
    for number in range(options.rounds + 1):
        _configure(options)
        budget = options.cache_mb * 10**6
        sets: dict = {
            side: NodeCache(ImageFolder(path), None, budget) for side, path in sources.items()
        }
        for epoch, name in enumerate(EPOCHS):
            if name == EPOCHS[-1]:
                _configure(options, cache_dir)
                sets = {side: ImageFolder(path) for side, path in sources.items()}
            for side in list(sources)[:: 1 if number % 2 else -1]:
                seconds = _epoch(step, sets[side], options, epoch)
                if number:  # the first round warms up
                    times[name][side].append(seconds)
    rows = [["epoch, s", "local files", "store", "store / local", "processor time"]]
    figures: dict = {}
    for name, by_side in times.items():
        walls, processor = np.array([by_side[side] for side in sources]).transpose(2, 0, 1)
        ratios = [report.median(seconds[1] / seconds[0]) for seconds in (walls, processor)]
        figures[name] = {"ratio": ratios[0], "processor": ratios[1]}
        for side, wall in zip(sources, walls, strict=True):
            figures[name][side] = report.summary(list(wall))
        spreads = [report.spread(list(wall)) for wall in walls]
        rows.append([name, *spreads, *(f"{ratio:.3f}" for ratio in ratios)])
    report.print_table(rows)
    return figures


def _configure(options, cache_dir=None):
    configure_storage(requests=options.requests, cache_dir=cache_dir)


def _epoch(step, datastore, options, epoch):
    """Train for one epoch. Return its elapsed time and the processor time of this process."""
    queue = MinibatchQueue(datastore, options.batch_size, workers=options.workers[0])
    start, processor = time.perf_counter(), time.process_time()
    for images, labels in queue.epoch(epoch):
        step(images, labels)
        del images, labels
    return time.perf_counter() - start, time.process_time() - processor
