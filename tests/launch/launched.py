"""Define functions that test_from_a_script.py launches.

The ranks import this module, which must not import pytest.
"""

import os
import signal
import sys
import threading
import time

import numpy as np

import mpidl as dl


def sizes(world, *arguments):
    return world.rank, world.size, world.gop("sum", world.rank + 1), arguments


def trained(world, pixels, labels):
    net = dl.Network([dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(3)], (1, 8, 8))
    store = dl.ArrayDatastore(pixels, labels)
    options = dl.TrainingOptions(epochs=2, batch_size=32, verbose_every=0)
    dl.train(net, store, options, world=world)
    return net


def speak(world, path):
    """Print two lines, and wait for a file to appear.

    Rank 0 prints both lines with one write, because mpirun may mix the writes of ranks.
    """
    end = "in two lines\n" if world.rank == 0 else "in two"
    sys.stdout.write(f"rank {world.rank} speaks\n{end}")
    sys.stdout.write("" if world.rank == 0 else " lines")
    sys.stderr.write("and here\n")
    while not os.path.exists(path):
        time.sleep(0.01)


class Unpicklable(Exception):
    """An exception whose pickle cannot be loaded."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raise_error():
    raise ValueError("a bad value")


def fail(world, statement, ranks):
    """Execute a statement on the given ranks, while the other ranks wait in a barrier."""
    if world.rank in ranks:
        exec(statement)
    world.barrier()


def hang(world):
    if world.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)  # longer than the test's limit
    world.barrier()


def train_on(world, out):
    """Train until an interrupt; return the result and the hash of the weights."""
    pixels = (np.arange(90 * 64).reshape(90, 8, 8) * 31 % 251).astype(np.uint8)
    net = dl.Network([dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(3)], (1, 8, 8), seed=0)
    options = {"epochs": 100_000, "batch_size": 32, "plots": "none", "output_functions": announce}
    store = dl.ArrayDatastore(pixels, np.arange(90) % 3)
    result = dl.train(net, store, dl.TrainingOptions(**options), world=world, out=out)
    return result, dl.weights_sha256(net)


def loop_until_stopped(world):
    """Report iterations of a loop until an interrupt; return the number on each rank."""
    iteration = 0
    while not world.stop_requested():
        iteration += 1
        world.report(epoch=1, iteration=iteration, loss=1 / iteration)
        if iteration == 5 and world.rank == 0:
            print("trains", flush=True)
    return world.gather(iteration)


def announce(info):
    if info.state == "iteration" and info.iteration == 5:
        print("trains", flush=True)


def wait_for_interrupt(world):
    print("waits", flush=True)
    time.sleep(1000)  # longer than the test's limit


def ignore_interrupts(world):
    signal.signal(signal.SIGINT, lambda *_: print("is interrupted", flush=True))
    print("waits", flush=True)
    while True:
        time.sleep(0.01)


def unsendable(world):
    return threading.Lock()


def launch_inside(world):
    return dl.launch(sizes, ranks=2)
