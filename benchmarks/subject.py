"""What is measured: a network, a mini-batch of random images, and our training step on them."""

import inspect
import time
from dataclasses import dataclass, field

import numpy as np

from mpidl import backends, keyed, ops
from mpidl.autodiff import value_and_grad
from mpidl.backends.cpu import builds
from mpidl.blocks import from_images, share
from mpidl.cli import start
from mpidl.comm.reducer import Reducer
from mpidl.nn import AveragePool2D, Conv2D, Dense, Dropout, ReLU, zoo
from mpidl.training.optimizers import SGDM

CLASSES, RATE, MOMENTUM = 10, 0.01, 0.9


def network(name, image=None, seed=0, dropout=True):
    """The Network of --network; image: (C, H, W) where it is not the network's own.

    dropout: without it, dropout layers drop nothing, as each library draws numbers of its own.
    """
    if image is None and name in zoo.NETWORKS:
        image = inspect.signature(zoo.NETWORKS[name]).parameters["input_shape"].default
    net = start.network(name, tuple(image or (1, 28, 28)), CLASSES, seed)
    for layer in net.layers:
        if isinstance(layer, Dropout) and not dropout:
            layer.probability = 0.0
    return net


def light(input_shape, classes):
    """The layers of a network whose step takes about as long as reading its images."""
    return [Conv2D(7, 8, stride=5), ReLU(), AveragePool2D(2), Dense(classes)]


def mini_batch(shape, count, seed=0):
    """(images (count, *shape) float32 between 0 and 1, labels (count,)): the same for who asks."""
    pixels = keyed.uniform(seed, "bench images", count * int(np.prod(shape)))
    labels = (keyed.uniform(seed, "bench labels", count) * CLASSES).astype(np.int64)
    return pixels.astype(np.float32).reshape(count, *shape), labels


def configure(chosen):
    """Set what this process computes with; returns lines that say what cannot be had."""
    backends.configure(threads=chosen.threads, winograd=chosen.winograd)
    if chosen.threads > 1 and builds.kernels() is None:
        return [f"--threads {chosen.threads}: NumPy does the arithmetic here, on one thread"]
    return []


def loss_of(net, images, labels):
    """The mean cross-entropy, as `dl.train` differentiates it."""
    return ops.softmax_cross_entropy(net(images), labels)


@dataclass
class Times:
    """Seconds of each step's parts; wait: for the gradients' exchange, within backward."""

    forward: list = field(default_factory=list)
    backward: list = field(default_factory=list)
    update: list = field(default_factory=list)
    wait: list = field(default_factory=list)

    def clear(self):
        for values in vars(self).values():
            values.clear()


class Step:
    """Our whole training step: forward, backward with the exchange, SGD with momentum.

    arrays: images and labels of the whole mini-batch, which lies in memory: reading images is no
    part of the step.
    """

    def __init__(self, net, arrays, world, batchnorm="global"):
        self.net, self.world, self.times = net, world, Times()
        images, labels = arrays
        batch = share(len(images), world)
        mine = slice(*batch.images)
        self.batch = (
            from_images(images[mine], batch),
            from_images(labels[mine], batch, np.int32),
        )
        self.initial = net.parameters, net.state
        self.reset(batchnorm)

    def reset(self, batchnorm="global"):
        """Begin again with the initial weights."""
        self.net.parameters, self.net.state = self.initial
        self.net.batchnorm = batchnorm
        self.sgdm = SGDM(RATE, MOMENTUM)

    def reducer(self):
        """The world's, which notes how long the end of backward waits for the sums."""
        times = self.times

        class Noting(Reducer):
            def finish(self):
                began = time.perf_counter()
                sums = super().finish()
                times.wait.append(time.perf_counter() - began)
                return sums

        return Noting(self.world, kernel_hook=self.world.advance)

    def gplus(self, value):
        return self.world.gplus(value)

    def __call__(self):
        """Make one step; returns the loss, a number."""
        forward = 0.0

        def timed(net, images, labels):
            nonlocal forward
            loss = loss_of(net, images, labels)
            forward = time.perf_counter()
            return loss

        began = time.perf_counter()
        loss, gradients, state = value_and_grad(timed, reduce=self)(self.net, *self.batch)
        backward = time.perf_counter()
        self.net.state = state
        self.net.parameters = self.sgdm(self.net.parameters, gradients)
        self.times.forward.append(forward - began)
        self.times.backward.append(backward - forward)
        self.times.update.append(time.perf_counter() - backward)
        return float(loss)
