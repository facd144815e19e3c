"""Our side of the timing: a recorded step on images that lie on the GPU, and its kernels by time.

A process of it: `python -m benchmarks.gpu.ours ADDRESS`.
"""

import sys

import numpy as np

from benchmarks import subject, turns
from mpidl import backends, losses
from mpidl.autodiff import value_and_grad
from mpidl.comm import World
from mpidl.data import ArrayDatastore
from mpidl.training.optimizers import SGDM

# What kernels call the numbers of a convolution: P, Q, R, S, C, K and the groups.
SHAPES = (
    ("P", "Q", "R", "S", "C", "K", "groups"),
    ("out_height", "out_width", "taps_down", "taps_across", "channels", "filters", "groups"),
)
SHADE = 1 << 28  # bytes copied before a step's kernels, so that these queue up meanwhile


def main(argv=None):
    """Take part until the other end hangs up; argv: the address."""
    (address,) = sys.argv[1:] if argv is None else argv
    world, made = World(threads=None), {}
    world.use_device("gpu")

    def prepare(name, what):
        """Record the step `what`, keywords of Step, under a name; the losses of its first steps."""
        made[name] = Step(world, **what)
        return made[name].losses(3)

    def run(name, count):
        return made[name].run(count)

    def kernels(name, rounds):
        return made[name].kernels(rounds)

    def drop():
        made.clear()

    def copy_rate():
        return bytes_per_second(world.device)

    actions = {f.__name__: f for f in (prepare, run, kernels, drop, copy_rate)}
    turns.serve(address, 0, actions)


class Step:
    """The step of `dl.train`: recorded, on a set of random images as large as the mini-batch.

    world: one rank, on a GPU. The images lie there as pixels, and that the mini-batch's are
    gathered is a part of the step.
    """

    def __init__(self, world, network, batch, precision="fp32", graphs=True, image=None):
        from mpidl.data.loading.device_queue import DeviceQueue
        from mpidl.training.gpu_step import StepProgram

        backends.configure(precision=precision)
        self.device = world.device
        self.net = subject.network(network, image, dropout=False)
        store = ArrayDatastore(*subject.mini_batch(self.net.input_shape, batch))
        queue = DeviceQueue(store, batch, 0, world, "never")
        self.net.to(self.device)
        gradient = value_and_grad(losses.cross_entropy, reduce=world)
        sgdm = SGDM(subject.RATE, subject.MOMENTUM)
        self.step = StepProgram(self.net, sgdm, gradient, queue.reader(), world.counts, graphs)
        ((self.feed, _),) = queue.epoch(0)

    @property
    def program(self):
        return self.step.program

    def losses(self, count):
        """The losses of so many steps, one after the other."""
        return [self.step.finish(self.step.start(self.feed))[0] for _ in range(count)]

    def run(self, count):
        """Milliseconds of a step, the mean over so many that follow each other."""
        first = self.device.mark(timed=True)
        for _ in range(count):
            self.step.start(self.feed)
        last = self.device.mark(timed=True)
        self.device.wait(last)
        return self.device.elapsed(first, last) / count

    def kernels(self, rounds, shade=SHADE):
        """[{"name", "times", "ms", "bytes", "flop"}, ...] of the launches of a step, in order of
        their time: each kernel, with the shape it worked on, how many times a step launches it,
        and of all these together the median milliseconds, the bytes and the operations."""
        watched = [Watched(s) for segment in self.program.segments for s in segment]
        kept = self.program.segments, self.program.graphs
        copies = [self.device.allocate(shade) for _ in range(2)]
        self.program.segments, self.program.graphs = [watched], None
        try:
            for _ in range(rounds):
                for _ in range(4 + len(watched) // 8):
                    self.device.copy(copies[0].address, copies[1].address, shade)
                self.losses(1)
        finally:
            self.program.segments, self.program.graphs = kept
        found = {}
        for one in watched:
            if one.launch is not None:
                key = named(one.launch), described(one.launch)
                found.setdefault(key, []).append(one)
        rows = [
            {
                "name": name,
                "shape": shape,
                "times": len(members),
                "ms": sum(one.milliseconds() for one in members),
                "bytes": sum(touched(one.launch) for one in members),
                "flop": sum(operations(one.launch) for one in members),
            }
            for (name, shape), members in found.items()
        ]
        return sorted(rows, key=lambda row: -row["ms"])


class Watched:
    """A step of a program, with events around it."""

    captured = True

    def __init__(self, step):
        self.step, self.launch = step, getattr(step, "launch", None)
        self.marks, self.device = [], None

    def play(self, device):
        self.device, before = device, device.mark(timed=True)
        self.step.play(device)
        self.marks.append((before, device.mark(timed=True)))

    def milliseconds(self):
        return float(np.median([self.device.elapsed(*pair) for pair in self.marks]))


def named(launch):
    """A launch's kernel; of one that convolves both ways, which way."""
    backward = ("BACKWARD", 1) in launch.unit.defines
    return f"{launch.name}, backward" if backward else launch.name


def described(launch):
    """What a launch worked on: the shapes of its largest arrays."""
    arrays = sorted(_arrays(launch), key=lambda a: -a.nbytes)
    return ", ".join("x".join(map(str, a.dims)) for a in arrays[:2])


def _arrays(launch):
    found = []
    for value in launch.arguments:
        found += getattr(value, "arrays", [value] if hasattr(value, "dims") else [])
    return found


def touched(launch):
    """Bytes of the arrays a launch is given, each once: what it reads and writes at least, or, of
    a kernel that gathers from a larger array, more."""
    places = {(array.address, array.nbytes) for array in _arrays(launch)}
    return sum(nbytes for _, nbytes in places)


def operations(launch):
    """Floating-point operations of the products that a launch makes: of a convolution or a dense
    layer in one of its three directions; 0 of other kernels."""
    named = zip(launch.parameters, launch.arguments, strict=True)
    number = {p.name: value for p, value in named if p.element is None}
    per_image = [a for a in _arrays(launch) if a.ndim > 2 and a.shape[-1] == 16]
    if not per_image:
        return 0
    images = per_image[0].shape[0] * 16
    if {"outputs", "features"} <= set(number):
        return 2 * images * number["outputs"] * number["features"]
    for names in SHAPES:
        if set(names) <= set(number):
            p, q, r, s, c, k, groups = (number[name] for name in names)
            return 2 * images * p * q * r * s * c * k // groups
    return 0


def bytes_per_second(device, size=1 << 30, rounds=9):
    """Of a copy of `size` bytes within the device's memory, read and written both counted."""
    first, second = (device.allocate(size) for _ in range(2))
    times = []
    for _ in range(rounds):
        before = device.mark(timed=True)
        device.copy(first.address, second.address, size)
        after = device.mark(timed=True)
        device.wait(after)
        times.append(device.elapsed(before, after))
    return 2 * size / (float(np.median(times)) / 1e3)


if __name__ == "__main__":
    main()
