"""Create the network, the random mini-batch and the task that all sides of a benchmark share."""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Sequence

import numpy as np

from mpidl import backends
from mpidl.backends.cpu import builds
from mpidl.backends.shapes import Geometry, Windows
from mpidl.cli import start
from mpidl.core import keyed
from mpidl.nn import AveragePool2D, Conv2D, Dense, Dropout, Network, ReLU, StochasticDepth, zoo
from mpidl.ops import check
from mpidl.ops.pool import windows

CLASSES, RATE, MOMENTUM = 10, 0.01, 0.9
# options that every side receives
TASK = ("network", "image", "batch_size", "seed", "threads", "precision")


def network(
    name: str, image: Sequence[int] | None = None, seed: int = 0, dropout: bool = True
) -> Network:
    """Return the network that `--network` names.

    Parameters
    ----------
    name : str
        Name in the zoo, or FILE.py:FUNCTION.
    image : sequence of int or None
        Image shape (C, H, W). None means the default shape of the network, or (1, 28, 28) if the
        network has no default.
    seed : int
        Seed of the initial weights.
    dropout : bool
        False sets the probability of dropout layers to 0, because each library draws different
        random numbers.
    """
    if image is None and name in zoo.NETWORKS:
        image = inspect.signature(zoo.NETWORKS[name]).parameters["input_shape"].default
    net = start.network(name, tuple(image or (1, 28, 28)), CLASSES, seed)
    for layer in net.layers:
        if isinstance(layer, (Dropout, StochasticDepth)) and not dropout:
            layer.probability = 0.0
    return net


def light(input_shape, classes: int) -> list:
    """Return the layers of a network whose step takes about as long as reading its images."""
    return [Conv2D(7, 8, stride=5), ReLU(), AveragePool2D(2), Dense(classes)]


def mini_batch(shape: Sequence[int], count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return random float32 images (count, *shape) in [0, 1) and int64 labels (count,).

    The same arguments give the same arrays in every process.
    """
    pixels = keyed.uniform(seed, "bench images", count * int(np.prod(shape)))
    labels = (keyed.uniform(seed, "bench labels", count) * CLASSES).astype(np.int64)
    return pixels.astype(np.float32).reshape(count, *shape), labels


def conv_geometry(layer) -> Geometry:
    """Return the Geometry of a convolution."""
    stride, dilation = (
        check.pair(layer.name, option, getattr(layer, option), 1)
        for option in ("stride", "dilation")
    )
    return Geometry(stride, check.pads(layer.name, layer.padding), dilation, layer.groups)


def pool_windows(layer, shape: Sequence[int]) -> Windows:
    """Return the Windows of a pooling layer for images of the given shape."""
    return windows(layer.name, tuple(shape), layer.size, layer.stride, layer.padding)[0]


def configure(options: argparse.Namespace) -> list[str]:
    """Apply `threads`, `winograd` and `precision` to this process. Return warnings to print."""
    backends.configure(
        threads=options.threads, winograd=options.winograd, precision=options.precision
    )
    if options.threads > 1 and builds.kernels() is None:
        return [f"--threads {options.threads}: NumPy does the arithmetic here, on one thread"]
    return []


def print_head(options: argparse.Namespace, text: str, notes: Sequence[str] = ()) -> None:
    """Print the first line of a benchmark and its warnings."""
    head = f"{options.network}, batch {options.batch_size}, {options.precision}, "
    head += f"{options.threads} thread(s) per rank"
    print("\n".join([f"{head}, {text}", *(f"warning: {note}" for note in notes)]), flush=True)


def task(options: argparse.Namespace, cores: list[list[int]], **entries) -> str:
    """Return the task of a side's process as JSON: what to compute and on which cores.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed command line of the sub-command.
    cores : list of list of int
        The cores of each process.
    **entries
        Additional entries of the task.
    """
    return json.dumps({name: getattr(options, name) for name in TASK} | {"cores": cores} | entries)


def join(argv: Sequence[str] | None, rank: int | None = None) -> tuple[argparse.Namespace, str]:
    """Parse a side's command line, TASK ADDRESS, and pin this process to its cores.

    Return the task and the address. `rank` defaults to the rank in the task.
    """
    text, address = sys.argv[1:] if argv is None else argv
    job = argparse.Namespace(**json.loads(text))
    os.sched_setaffinity(0, job.cores[job.rank if rank is None else rank])
    return job, address


def prepare(job: argparse.Namespace) -> tuple[Network, np.ndarray, np.ndarray]:
    """Return the network of a task, without dropout, and its images and labels."""
    net = network(job.network, job.image, job.seed, dropout=False)
    return net, *mini_batch(net.input_shape, job.batch_size, job.seed)
