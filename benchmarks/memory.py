"""`python -m benchmarks memory`: check that the memory of a rank stays the same over time.

A tiny network trains for many steps, with checkpoints, validations, plots and metrics. A hook
samples the resident memory of each rank. From the step `--warm-up` on, no sample may exceed the
first sample by more than `--percent`. Under mpirun, the launched ranks train together.
"""

import argparse
import shutil
import tempfile

import numpy as np

import mpidl as dl
from benchmarks import report
from mpidl.errors import Fault
from mpidl.ranks.world import World
from mpidl.training.options import configuration
from mpidl.training.rank_times import resident_bytes
from mpidl.training.trainer import Trainer

SAMPLES = 100  # samples after the warm-up
ROWS = 10  # rows of the table
BATCH, BATCHES, CLASSES, SIDE = 16, 500, 4, 8  # an epoch has BATCHES mini-batches
MIB = 1 << 20


class MemorySampler:
    """A hook that samples the resident memory of this rank.

    Parameters
    ----------
    steps : int
        Steps of the training.
    warm_up : int
        The step of the first sample.

    Attributes
    ----------
    samples : list of (int, int)
        Step and resident bytes.
    """

    def __init__(self, steps: int, warm_up: int) -> None:
        self.warm_up, self.period = warm_up, max((steps - warm_up) // SAMPLES, 1)
        self.samples: list[tuple[int, int]] = []

    def step(self, trainer: Trainer) -> None:
        """Take a sample, if one is due."""
        beyond = trainer.position.iteration - self.warm_up
        if beyond >= 0 and beyond % self.period == 0:
            self.samples.append((trainer.position.iteration, resident_bytes()))


def main(options: argparse.Namespace) -> dict | None:
    """Run the benchmark; on rank 0, return its results for the JSON file.

    Raises
    ------
    Fault
        If the memory of a rank grows by more than `--percent`.
    """
    world = World(timeout=options.timeout, threads=1)
    ranks = world.gather(train(world, options.steps, options.warm_up))
    if ranks is None:
        return None
    steps = ranks[0][-1][0]  # fewer than requested if the training was stopped
    print(f"resident memory of each rank in MiB, {steps} steps on {world.size} rank(s)")
    rows = [["step", *(f"rank {rank}" for rank in range(world.size))]]
    row_numbers = np.linspace(0, len(ranks[0]) - 1, ROWS).round().astype(int)
    for number in dict.fromkeys(row_numbers):
        sizes = [f"{samples[number][1] / MIB:.2f}" for samples in ranks]
        rows.append([str(ranks[0][number][0]), *sizes])
    report.print_table(rows)
    growth = [growth_of(samples) for samples in ranks]
    print(f"growth: {', '.join(f'{100 * part:+.2f} %' for part in growth)}")
    if max(growth) > options.percent / 100:
        raise Fault(
            f"the memory of a rank has grown by {100 * max(growth):.2f} % since step "
            f"{options.warm_up}, expected at most {options.percent:g} %"
        )
    print(f"flat within {options.percent:g} % after step {options.warm_up}")
    versions = configuration.versions_of(world.transport.MPI.Get_library_version())
    record = report.header(options, versions, "steps", "warm_up", "percent")
    return record | {"ranks": world.size, "growth": growth, "bytes": ranks}


def growth_of(samples: list[tuple[int, int]]) -> float:
    """Return the growth from the first to the largest sample, as a fraction of the first sample."""
    first = samples[0][1]
    return max(size for _, size in samples) / first - 1


def train(world: World, steps: int, warm_up: int) -> list[tuple[int, int]]:
    """Train a tiny network; return the samples of this rank. Collective."""
    random = np.random.default_rng(0)
    shape = (BATCH * BATCHES, 1, SIDE, SIDE)
    labels = np.arange(shape[0]) % CLASSES
    store = dl.ArrayDatastore(random.integers(0, 256, shape, np.uint8), labels)
    layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(CLASSES)]
    net = dl.Network(layers, shape[1:], seed=0)
    sampler = MemorySampler(steps, warm_up)
    settings = dl.TrainingOptions(
        epochs=steps,  # `max_iterations` ends the run
        max_iterations=steps,
        batch_size=BATCH,
        learning_rate=1e-3,
        validation_fraction=0.02,
        validation_frequency=500,
        checkpoint_every=300,
        compare_ranks_every=100,
        batchnorm_statistics="moving",
        verbose="off",
        verbose_every=0,
    )
    folder = world.broadcast(tempfile.mkdtemp(prefix="mpidl-bench-") if not world.rank else None)
    try:
        dl.train(net, store, settings, world=world, out=folder, hooks=[sampler])
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return sampler.samples
