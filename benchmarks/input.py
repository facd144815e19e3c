"""`python -m benchmarks input`: measure reading, decoding and augmenting images during training.

For each kind of file and number of workers, the benchmark measures the images per second of the
pipeline alone, of the step alone, and of both together. The benchmark also reports two ratios. The
first is the time of an epoch from a packed file divided by the time from memory. The second is the
cost of decoding, cropping and mirroring divided by the cost of decoding with Pillow. `input_memory`
implements --memory, and `packs` implements --packs.
"""

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from benchmarks import decoding, input_memory, machine, packs, report, subject, turns
from benchmarks.mpidl_step import EagerStep
from mpidl.core import keyed
from mpidl.data import Augmenter, ImageFolder, MinibatchQueue, PackedDatastore, digits
from mpidl.data.array_datastore import ArrayDatastore
from mpidl.data.formats import packing
from mpidl.errors import UserError
from mpidl.nn import Network
from mpidl.ranks.world import World
from mpidl.training.options import configuration

CLASSES, QUALITY = 4, 85
DRAWN = ("jpeg", "png", "whole")  # kinds of image files
FILE_SIDE = 256  # height and width in pixels of the files that are cropped


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    if machine.is_launched():
        raise UserError("bench input starts its own processes: run it without mpirun")
    if options.memory:
        return input_memory.run(options)
    names = ("side", "images", "batch_size", "threads", "network", "seed")
    versions = configuration.versions_of("one rank")
    if options.packs:
        print(f"{options.images} JPEG files of {FILE_SIDE}x{FILE_SIDE}, {options.rounds} rounds")
        with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
            draw(folder, FILE_SIDE, options.images, ["whole"])
            record = packs.run(options, os.path.join(folder, "whole"), FILE_SIDE)
        return report.header(options, versions, *names) | {"packs": record}
    notes = subject.configure(options)
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        draw(folder, options.side, options.images)
        text = f"{options.images} images of 3x{options.side}x{options.side}, "
        text += f"{machine.arithmetic()}, {options.rounds} interleaved rounds"
        subject.print_head(options, text, notes)
        figures = {
            "input": measure_input(options, folder),
            "epoch": measure_epochs(options, folder),
            "decode": decoding.run(options, os.path.join(folder, "whole"), FILE_SIDE),
        }
    return report.header(options, versions, *names) | figures


def draw(folder: str, side: int, count: int, kinds: Sequence[str] = DRAWN) -> None:
    """Write image files that resemble photographs: smooth colours, edges and some noise.

    `kinds` names the sub-folders to write: jpeg and png with images of `side` pixels, and whole
    with images of `FILE_SIDE` pixels.
    """
    from PIL import Image

    for size, drawn in ((side, ("jpeg", "png")), (FILE_SIDE, ("whole",))):
        drawn = [kind for kind in drawn if kind in kinds]
        y, x = np.mgrid[:size, :size] / size
        for i in range(count if drawn else 0):
            u = keyed.uniform(0, "bench pictures", 3 * size * size + 30, sample=i)
            waves = [
                np.sin(6 * u[j] * x + 9 * u[j + 3] * y + 6 * u[j + 6]) + (x * u[j + 9] > y - 0.3)
                for j in range(3)
            ]
            noise = u[30:].reshape(size, size, 3) - 0.5
            pixels = np.stack(waves, -1) * 70 + 100 + 24 * noise
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            for kind in drawn:
                suffix = "png" if kind == "png" else "jpg"
                path = os.path.join(folder, kind, f"class{i % CLASSES}", f"{i:05}.{suffix}")
                os.makedirs(os.path.dirname(path), exist_ok=True)
                image.save(path, quality=QUALITY)  # PNG ignores the quality


def stores_of(folder):
    """Return {kind of file: datastore}, with the same images in all datastores."""
    stores = {kind: ImageFolder(os.path.join(folder, kind)) for kind in ("jpeg", "png")}
    path = os.path.join(folder, "packed.h5")
    if not os.path.exists(path):
        packing.pack({"train": stores["png"]}, path)
    stores["packed"] = PackedDatastore(path)
    indices = np.arange(len(stores["png"]))
    stores["arrays"] = ArrayDatastore(stores["png"].read(indices), stores["png"].labels)
    return stores


def measure_input(options: argparse.Namespace, folder: str) -> dict:
    """Measure images per second for each kind of file and number of workers.

    Returns
    -------
    dict
        {kind of file: {number of workers: figures}}. The figures are summaries of "pipeline",
        "step" and "both", and "share", the rate of "both" divided by the lower of the other two
        rates.
    """
    shape, figures = (3, options.side, options.side), {}
    if options.network == "light":
        net = Network(subject.light(shape, CLASSES), shape)
    else:
        net = subject.network(options.network, shape)
    step = EagerStep(net, None, World())
    rows = [["images/s", "workers", "pipeline", "step", "both", "both / slower"]]
    for (kind, store), workers in itertools.product(stores_of(folder).items(), options.workers):
        if kind not in options.kinds:
            continue
        augmenter = Augmenter(reflect_x=True, translate_x=4, translate_y=4)
        queue = MinibatchQueue(store, options.batch_size, workers=workers, augmenter=augmenter)
        rates = _rates(step, queue, options.rounds)
        cell = {name: report.summary(values) for name, values in rates.items()}
        slower = np.minimum(rates["pipeline"], rates["step"])
        cell["share"] = report.median(np.array(rates["both"]) / slower)
        figures.setdefault(kind, {})[str(workers)] = cell
        medians = [f"{cell[name]['median']:.0f}" for name in rates]
        rows.append([kind, workers, *medians, f"{cell['share']:.3f}"])
    report.print_table(rows)
    return figures


def _rates(step, queue, rounds):
    """Return the images per second of each round for "pipeline", "step" and "both"."""
    batch = next(queue.epoch(0))
    epochs = itertools.count()

    def pipeline():
        return sum(images.batch.count for images, _ in queue.epoch(next(epochs)))

    def steps():
        for _ in range(len(queue)):
            step(*batch)
        return len(queue) * batch[0].batch.count

    def both():
        count = 0
        for images, labels in queue.epoch(next(epochs)):
            step(images, labels)
            count += images.batch.count
        return count

    functions = {"pipeline": pipeline, "step": steps, "both": both}
    rates = {name: [] for name in functions}
    for number, name in turns.alternate(functions, rounds + 1):
        start = time.perf_counter()
        count = functions[name]()
        if number:  # the first round warms up
            rates[name].append(count / (time.perf_counter() - start))
    return rates


def measure_epochs(options: argparse.Namespace, folder: str) -> dict:
    """Time an epoch of digits from plain arrays and, with augmentation, from a packed file.

    The augmentation mirrors and shifts the images.

    Returns
    -------
    dict
        "arrays" and "packed" hold summaries of the milliseconds; "ratio" is packed over arrays.
    """
    train, _ = digits().split(0.9, seed=0)
    path = os.path.join(folder, "digits.h5")
    packing.pack({"train": train}, path)
    arrays = ArrayDatastore(train.read(np.arange(len(train))), train.labels, train.classes)
    augmenter = Augmenter(reflect_x=True, translate_x=4, translate_y=4)
    queues = {
        "arrays": MinibatchQueue(arrays, 128),
        "packed": MinibatchQueue(PackedDatastore(path), 128, augmenter=augmenter),
    }
    step = EagerStep(subject.network("digits"), None, World())
    times = {name: [] for name in queues}
    for number, name in turns.alternate(queues, options.rounds + 1):
        start = time.perf_counter()
        for images, labels in queues[name].epoch(number):
            step(images, labels)
        if number:  # the first round warms up
            times[name].append(time.perf_counter() - start)
    ratio = report.median(np.array(times["packed"]) / np.array(times["arrays"]))
    print(
        f"digits epoch, ms: arrays {report.spread(times['arrays'], 1e3, 0)}, packed, mirrored and "
        f"shifted {report.spread(times['packed'], 1e3, 0)}, packed / arrays {ratio:.3f}"
    )
    return {name: report.summary(values, 1e3) for name, values in times.items()} | {"ratio": ratio}
