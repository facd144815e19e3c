"""What is measured: a network, a mini-batch of random images, and the task that sides share."""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Sequence

import numpy as np

from mpidl import backends, keyed
from mpidl.backends.cpu import builds
from mpidl.cli import start
from mpidl.nn import AveragePool2D, Conv2D, Dense, Dropout, Network, ReLU, zoo
from mpidl.ops import check
from mpidl.ops.pool import windows

CLASSES, RATE, MOMENTUM = 10, 0.01, 0.9
TASK = ("network", "image", "batch_size", "seed", "threads")  # options that every side gets


def network(
    name: str, image: Sequence[int] | None = None, seed: int = 0, dropout: bool = True
) -> Network:
    """Return the network that `--network` names.

    Parameters
    ----------
    name : str
        Name in the zoo, or FILE.py:FUNCTION.
    image : sequence of int or None
        Image shape (C, H, W); None takes that of the network, else (1, 28, 28).
    seed : int
        Seed of the initial weights.
    dropout : bool
        False sets the probability of dropout layers to 0, as each library draws its own numbers.
    """
    if image is None and name in zoo.NETWORKS:
        image = inspect.signature(zoo.NETWORKS[name]).parameters["input_shape"].default
    net = start.network(name, tuple(image or (1, 28, 28)), CLASSES, seed)
    for layer in net.layers:
        if isinstance(layer, Dropout) and not dropout:
            layer.probability = 0.0
    return net


def light(input_shape, classes: int) -> list:
    """Return layers of a network whose step takes about as long as reading its images."""
    return [Conv2D(7, 8, stride=5), ReLU(), AveragePool2D(2), Dense(classes)]


def mini_batch(shape: Sequence[int], count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return random images, (count, *shape) float32 in [0, 1), and int64 labels (count,).

    The same arguments give the same arrays in every process.
    """
    pixels = keyed.uniform(seed, "bench images", count * int(np.prod(shape)))
    labels = (keyed.uniform(seed, "bench labels", count) * CLASSES).astype(np.int64)
    return pixels.astype(np.float32).reshape(count, *shape), labels


def conv_args(layer) -> tuple:
    """Return a convolution's (stride, pads, dilation, groups)."""
    stride, dilation = (
        check.pair(layer.name, option, getattr(layer, option), 1)
        for option in ("stride", "dilation")
    )
    return stride, check.pads(layer.name, layer.padding), dilation, layer.groups


def pool_args(layer, shape: Sequence[int]) -> tuple:
    """Return a pooling layer's (size, stride, pads) for images of a shape."""
    return windows(layer.name, tuple(shape), layer.size, layer.stride, layer.padding)[:3]


def configure(options: argparse.Namespace) -> list[str]:
    """Apply `threads` and `winograd` to this process; return warnings to print."""
    backends.configure(threads=options.threads, winograd=options.winograd)
    if options.threads > 1 and builds.kernels() is None:
        return [f"--threads {options.threads}: NumPy does the arithmetic here, on one thread"]
    return []


def print_head(options: argparse.Namespace, text: str, notes: Sequence[str] = ()) -> None:
    """Print the first line of a benchmark of a network, and warnings."""
    head = f"{options.network}, batch {options.batch_size}, {options.threads} thread(s) a rank"
    print("\n".join([f"{head}, {text}", *(f"warning: {note}" for note in notes)]), flush=True)


def task(options: argparse.Namespace, cores: list[list[int]], **entries) -> str:
    """Return the JSON that tells a process of a side what to compute.

    Parameters
    ----------
    options : argparse.Namespace
        The command's options.
    cores : list of list of int
        Cores of each process.
    **entries
        Further entries.
    """
    return json.dumps({name: getattr(options, name) for name in TASK} | {"cores": cores} | entries)


def join(argv: Sequence[str] | None, rank: int | None = None) -> tuple[argparse.Namespace, str]:
    """Read a side's command line, TASK ADDRESS, and pin this process to its cores.

    `rank` is by default the task's own. Return the task and the address.
    """
    text, address = sys.argv[1:] if argv is None else argv
    job = argparse.Namespace(**json.loads(text))
    os.sched_setaffinity(0, job.cores[job.rank if rank is None else rank])
    return job, address


def prepare(job: argparse.Namespace) -> tuple[Network, np.ndarray, np.ndarray]:
    """Return a task's network without dropout, its images and its labels."""
    net = network(job.network, job.image, job.seed, dropout=False)
    return net, *mini_batch(net.input_shape, job.batch_size, job.seed)
