"""Train networks in bfloat16 with several builds and threads; print the hashes of the weights.

    python narrow.py NETWORKS BUILDS THREADS ITERATIONS FOLDER

The items of lists are separated by commas. The last line is {NETWORK: list of hashes} in JSON,
with a hash for each build and number of threads. A run whose folder exists is resumed.
"""

import json
import os
import sys

import networks
import numpy as np

import mpidl as dl
from mpidl.backends.cpu import builds

SHAPE, CLASSES, COUNT = (3, 32, 32), 3, 70
ZOO = {"digits": dl.nn.zoo.digits, "cifar": dl.nn.zoo.cifar}


def network(name):
    layers = ZOO[name](SHAPE, CLASSES).layers if name in ZOO else getattr(networks, name)
    layers = layers(SHAPE, CLASSES) if callable(layers) else layers
    return dl.Network(layers, SHAPE, seed=0)


def data(name):
    """Return images, and a label for each image or pixel."""
    numbers = np.random.default_rng(0)
    pixels = numbers.integers(0, 256, (COUNT, *SHAPE), np.uint8)
    return pixels, numbers.integers(0, CLASSES, (COUNT, *SHAPE[1:]) if name == "unet" else COUNT)


def trained_hash(world, name, threads, iterations, out):
    """Train with mini-batches of 40 and 30 images, and return the hash of the weights."""
    options = {"epochs": 9, "batch_size": 40, "learning_rate": 0.05, "precision": "bf16"}
    options |= {"threads": threads, "max_iterations": iterations, "verbose": False}
    net, resume = network(name), out if world.broadcast(os.path.exists(out)) else None
    options = dl.TrainingOptions(plots="none", **options)
    dl.train(net, data(name), options, world=world, out=out, resume=resume)
    return dl.weights_sha256(net)


def main(names, build_names, threads, iterations, folder):
    world, hashes, before = dl.World(), {}, builds.running()
    for build in build_names.split(","):
        builds.use(build)
        for name in names.split(","):
            for count in map(int, threads.split(",")):
                out = os.path.join(folder, f"{name} {build} {count}")
                end = trained_hash(world, name, count, int(iterations), out)
                hashes.setdefault(name, []).append(end)
    builds.use(before)
    if world.rank == 0:
        print(json.dumps(hashes))


if __name__ == "__main__":
    main(*sys.argv[1:])
