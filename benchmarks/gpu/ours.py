"""Run mpidl's side of the GPU timing: `python -m benchmarks.gpu.ours ADDRESS`.

This side times a recorded step and each of its kernels.
"""

import gc
import sys

import numpy as np

from benchmarks import turns
from benchmarks.gpu import launches
from benchmarks.mpidl_step import RecordedStep
from mpidl.ranks.world import World

# Bytes to copy: before a step, while the step's kernels queue up, and to measure the rate. A small
# GPU copies this part of its memory.
DELAY_BYTES, RATE_BYTES, PART = 1 << 28, 1 << 30, 64


def main(argv=None):
    """Serve the requests of the benchmark at the address in `argv`; see `turns`."""
    (address,) = sys.argv[1:] if argv is None else argv
    world, steps = World(threads=None), {}
    world.use_device("gpu")

    def prepare(name, options):
        """Record a step with these options, store it by name and return its first losses."""
        steps[name] = RecordedStep(world, **options)
        return steps[name].losses(3)

    def run(name, count):
        return steps[name].run(count)

    def kernels(name, rounds):
        return kernel_times(steps[name], rounds)

    def drop():
        steps.clear()
        gc.collect()  # frees the memory of programs in reference cycles

    def copy_rate():
        return bytes_per_second(world.device)

    turns.serve(address, 0, prepare, run, kernels, drop, copy_rate)


def kernel_times(step: RecordedStep, rounds: int, delay_bytes: int = DELAY_BYTES) -> list[dict]:
    """Return the kernels of a step by name and shape, sorted by their time.

    Parameters
    ----------
    step : RecordedStep
        The step. It runs `rounds` times without graphs.
    rounds : int
        Number of steps for the medians.
    delay_bytes : int
        Number of bytes that are copied before each step.

    Returns
    -------
    list of dict
        For each kernel "name" and "shape": "times", the number of launches per step; "ms", the
        median time of these launches together; "bytes" and "flop", the bytes and operations of
        these launches.
    """
    program, device = step.program, step.device
    timed = [TimedStep(part) for segment in program.segments for part in segment]
    original = program.segments, program.graphs
    delay_bytes = min(delay_bytes, device.memory // PART)
    copies = [device.allocate(delay_bytes) for _ in range(2)]
    program.segments, program.graphs = [timed], None
    try:
        for _ in range(rounds):
            for _ in range(4 + len(timed) // 8):
                device.copy(copies[0].address, copies[1].address, delay_bytes)
            step.losses(1)
    finally:
        program.segments, program.graphs = original
    groups = {}
    for part in timed:
        if part.launch is not None:
            key = launches.kernel_name(part.launch), launches.array_shapes(part.launch)
            groups.setdefault(key, []).append(part)
    rows = [
        {
            "name": name,
            "shape": shape,
            "times": len(members),
            "ms": sum(part.milliseconds() for part in members),
            "bytes": sum(sum(launches.bytes_of(part.launch)) for part in members),
            "flop": 2 * sum(launches.useful(part.launch) for part in members),
        }
        for (name, shape), members in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


class TimedStep:
    """A step of a program, timed by an event before the step and an event after it."""

    captured = True

    def __init__(self, step):
        self.step, self.launch = step, step.launch
        self.marks, self.device = [], None

    def play(self, device):
        """Run the step and record an event before and after it."""
        self.device, before = device, device.mark(timed=True)
        self.step.play(device)
        self.marks.append((before, device.mark(timed=True)))

    def milliseconds(self) -> float:
        """Return the median time of the runs so far."""
        return float(np.median([self.device.elapsed(*pair) for pair in self.marks]))


def bytes_per_second(device, size: int = RATE_BYTES, rounds: int = 9) -> float:
    """Return the bytes/s of a copy of `size` bytes on the device, counting reads and writes."""
    size = min(size, device.memory // PART)
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
