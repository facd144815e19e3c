"""Compare packed JPEG files with the folder that holds them: speed in turns, and size.

`input` calls this module for `--packs`. An epoch of each set reads, decodes and crops all images in
threads, without a network. Rates are images per second; the ratio of processor times is less
disturbed by other work on the machine.
"""

import argparse
import os
import time

import numpy as np

from benchmarks import report, turns
from mpidl.data import Augmenter, ImageFolder, MinibatchQueue, PackedDatastore
from mpidl.data.formats import pack_contents, packing

SHARDS = 4


def run(options: argparse.Namespace, folder: str, file_side: int) -> dict:
    """Measure a folder of JPEG files and packs of it, print the results and return them.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed command line of the sub-command.
    folder : str
        Folder of the JPEG files, with sub-folders of classes.
    file_side : int
        Height and width of the files, in pixels.

    Returns
    -------
    dict
        By number of workers and set: summaries of images/s, and the median ratios of the rates and
        of the processor times, each in favour of the pack if above 1. "size" has the bytes of the
        packs divided by those of decoded pixels.
    """
    files = ImageFolder(folder)
    stores, size = {"folder": files}, {}
    for name, shards in (("pack", None), (f"{SHARDS} shards", SHARDS)):
        path = os.path.join(os.path.dirname(folder), f"packed-{shards or 0}.h5")
        packing.pack({"train": files}, path, images="encoded", shards=shards)
        stores[name] = PackedDatastore(path)
        total = sum(map(os.path.getsize, pack_contents.files_of(path)))
        size[name] = total / (len(files) * 3 * file_side**2)
    augmenter = Augmenter(reflect_x=True, crop=(options.side, options.side))
    record, rows = {"size": size}, [["images/s", "workers", *stores, "ratio", "CPU ratio", "size"]]
    for workers in options.workers:
        queues = {
            name: MinibatchQueue(store, options.batch_size, workers=workers, augmenter=augmenter)
            for name, store in stores.items()
        }
        wall, processor = _epochs(queues, options.rounds)
        rates = {name: len(files) / np.array(times) for name, times in wall.items()}
        figures = {name: {"rate": report.summary(rates[name])} for name in stores}
        for name in size:
            figures[name]["ratio"] = report.median(rates[name] / rates["folder"])
            used = np.array(processor["folder"]) / np.array(processor[name])
            figures[name]["processor_ratio"] = report.median(used)
            rows.append(
                [name, workers]
                + [f"{figures[other]['rate']['median']:.0f}" for other in stores]
                + [f"{figures[name][key]:.3f}" for key in ("ratio", "processor_ratio")]
                + [f"{size[name]:.3f}"]
            )
        record[str(workers)] = figures
    report.print_table(rows)
    return record


def _epochs(queues, rounds):
    """Return the seconds and the processor seconds of an epoch, by queue, for each round."""
    wall = {name: [] for name in queues}
    processor = {name: [] for name in queues}
    for number, name in turns.alternate(queues, rounds + 1):
        start, used = time.perf_counter(), time.process_time()
        for images, labels in queues[name].epoch(number):
            del images, labels
        if number:  # the first round warms up
            wall[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - used)
    return wall, processor
