"""`python -m benchmarks input`: reading, decoding and augmenting images, beside the step.

For files of each kind and each number of workers: images per second of the pipeline alone, of the
step alone, and of both together; and what an epoch from a packed file costs above one from memory,
and decoding, cropping and mirroring above Pillow's decoding. With --memory, see `memory`.
"""

import itertools
import os
import tempfile
import time

import numpy as np

from benchmarks import decoding, machine, memory, subject, turns
from mpidl import keyed, losses
from mpidl.autodiff import value_and_grad
from mpidl.comm import World
from mpidl.data import Augmenter, ImageFolder, MinibatchQueue, PackedDatastore, digits
from mpidl.data.datastore import ArrayDatastore
from mpidl.data.formats import packing
from mpidl.errors import UserError
from mpidl.nn import Network
from mpidl.training.optimizers import SGDM
from mpidl.training.options import configuration

CLASSES, QUALITY = 4, 85
WHOLE = 256  # pixels a side of the files that are cropped


def main(chosen):
    """Run the sub-command; returns its exit code."""
    if machine.launched():
        raise UserError("bench input starts what it measures: run it without mpirun")
    if chosen.memory:
        machine.write_json(chosen.json, memory.run(chosen))
        return 0
    notes = subject.configure(chosen)
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        draw(folder, chosen.side, chosen.images)
        print(
            f"{chosen.images} images of 3x{chosen.side}x{chosen.side}, batch {chosen.batch_size}, "
            f"{chosen.threads} thread(s), {machine.arithmetic()}, {chosen.rounds} rounds in turns"
        )
        for line in notes:
            print(f"warning: {line}")
        result = {"input": together(chosen, folder)}
        result["epoch"] = epochs(chosen, folder)
        result["decode"] = decoding.run(chosen, os.path.join(folder, "whole"), WHOLE)
    versions = configuration.versions_of("one rank")
    about = ("side", "images", "batch_size", "threads", "network", "seed")
    result = machine.facts(chosen, versions) | {k: getattr(chosen, k) for k in about} | result
    machine.write_json(chosen.json, result)
    return 0


def draw(folder, side, count):
    """Image files to read: smooth colours, edges and some noise, as photographs have them."""
    from PIL import Image

    for size, kinds in ((side, ("jpeg", "png")), (WHOLE, ("whole",))):
        y, x = np.mgrid[:size, :size] / size
        for i in range(count):
            u = keyed.uniform(0, "bench pictures", 3 * size * size + 30, sample=i)
            waves = [
                np.sin(6 * u[j] * x + 9 * u[j + 3] * y + 6 * u[j + 6]) + (x * u[j + 9] > y - 0.3)
                for j in range(3)
            ]
            noise = u[30:].reshape(size, size, 3) - 0.5
            pixels = np.stack(waves, -1) * 70 + 100 + 24 * noise
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            for kind in kinds:
                suffix = "png" if kind == "png" else "jpg"
                path = os.path.join(folder, kind, f"class{i % CLASSES}", f"{i:05}.{suffix}")
                os.makedirs(os.path.dirname(path), exist_ok=True)
                image.save(path, quality=QUALITY)  # which PNG has no use for


def stores_of(folder):
    """{kind: datastore} of the same images."""
    stores = {kind: ImageFolder(os.path.join(folder, kind)) for kind in ("jpeg", "png")}
    path = os.path.join(folder, "packed.h5")
    if not os.path.exists(path):
        packing.pack({"train": stores["png"]}, path)
    stores["packed"] = PackedDatastore(path)
    everything = np.arange(len(stores["png"]))
    stores["arrays"] = ArrayDatastore(stores["png"].read(everything), stores["png"].labels)
    return stores


class Step:
    """A training step on whatever mini-batch comes."""

    def __init__(self, net):
        self.net, self.sgdm = net, SGDM(subject.RATE, subject.MOMENTUM)
        self.gradient = value_and_grad(losses.cross_entropy, reduce=World())

    def __call__(self, images, labels):
        _, gradients, state = self.gradient(self.net, images, labels)
        self.net.state = state
        self.net.parameters = self.sgdm(self.net.parameters, gradients)


def together(chosen, folder):
    """{kind: {workers: {"pipeline", "step", "both": images/s, "share": both / the slower}}}."""
    shape, rows = (3, chosen.side, chosen.side), {}
    if chosen.network == "light":
        net = Network(subject.light(shape, CLASSES), shape)
    else:
        net = subject.network(chosen.network, shape)
    step = Step(net)
    print(f"{'images/s':10}{'workers':>8}{'pipeline':>12}{'step':>12}{'both':>12}  of the slower")
    for (kind, store), workers in itertools.product(stores_of(folder).items(), chosen.workers):
        if kind not in chosen.kinds:
            continue
        queue = MinibatchQueue(
            store,
            chosen.batch_size,
            workers=workers,
            augmenter=Augmenter(reflect_x=True, translate_x=4, translate_y=4),
        )
        ready = next(queue.epoch(0))
        rounds = {"pipeline": [], "step": [], "both": []}
        number = itertools.count()

        def pipeline(queue=queue, number=number):
            return sum(images.batch.count for images, _ in queue.epoch(next(number)))

        def steps(queue=queue, ready=ready):
            for _ in range(len(queue)):
                step(*ready)
            return len(queue) * ready[0].batch.count

        def both(queue=queue, number=number):
            found = 0
            for images, labels in queue.epoch(next(number)):
                step(images, labels)
                found += images.batch.count
            return found

        functions = {"pipeline": pipeline, "step": steps, "both": both}
        for i in range(chosen.rounds + 1):
            for name in list(functions) if i % 2 else reversed(functions):
                began = time.perf_counter()
                count = functions[name]()
                if i:
                    rounds[name].append(count / (time.perf_counter() - began))
        found = {name: machine.summary(rates) for name, rates in rounds.items()}
        slower = np.minimum(rounds["pipeline"], rounds["step"])
        found["share"] = machine.median(np.array(rounds["both"]) / slower)
        rows.setdefault(kind, {})[str(workers)] = found
        rates = "".join(f"{found[name]['median']:12.0f}" for name in functions)
        print(f"{kind:10}{workers:8}{rates}  {found['share']:.3f}")
    return rows


def epochs(chosen, folder):
    """Seconds of a digits epoch from the packed file, mirrored and shifted, and from arrays as they
    are: {"arrays", "packed", "ratio"}."""
    train, _ = digits().split(0.9, seed=0)
    path = os.path.join(folder, "digits.h5")
    packing.pack({"train": train}, path)
    arrays = ArrayDatastore(train.read(np.arange(len(train))), train.labels, train.classes)
    moved = Augmenter(reflect_x=True, translate_x=4, translate_y=4)
    sides = {
        "arrays": MinibatchQueue(arrays, 128),
        "packed": MinibatchQueue(PackedDatastore(path), 128, augmenter=moved),
    }
    step, times = Step(subject.network("digits")), {name: [] for name in sides}
    for i in range(chosen.rounds + 1):
        for name in list(sides) if i % 2 else reversed(sides):

            def epoch(queue=sides[name], number=i):
                for images, labels in queue.epoch(number):
                    step(images, labels)

            seconds = turns.seconds(epoch)
            if i:
                times[name].append(seconds)
    ratio = machine.median(np.array(times["packed"]) / np.array(times["arrays"]))
    print(
        f"digits epoch, ms: arrays {machine.spread(times['arrays'], 1e3, 0)}, packed, mirrored and "
        f"shifted {machine.spread(times['packed'], 1e3, 0)}: {ratio:.3f}"
    )
    return {name: machine.summary(found, 1e3) for name, found in times.items()} | {"ratio": ratio}
