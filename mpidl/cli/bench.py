"""`python -m mpidl.bench`: measurements, as ratios of things that take turns in one run."""

import time

import numpy as np

from mpidl import data
from mpidl.cli import arguments, start
from mpidl.comm import World, guard
from mpidl.comm.reducer import Reducer
from mpidl.tape import value_and_grad
from mpidl.training import options
from mpidl.training.loop import model_loss


def main(argv=None):
    """Run the command; returns its exit code."""
    given = arguments.bench(argv, quiet=guard.launched_rank() > 0)
    settings = options.resolve(given.given)
    start.check_device(settings.options.device)
    fold(settings, given.rounds, given.iterations)
    return 0


class _Timed:
    """A world whose reducer notes how long the end of backward waits for the sums."""

    def __init__(self, world):
        self.world, self.waits, self.gplus = world, [], world.gplus

    def reducer(self):
        outer = self

        class Noting(Reducer):
            def finish(self):
                began = time.perf_counter()
                sums = super().finish()
                outer.waits.append(time.perf_counter() - began)
                return sums

        return Noting(self.world)


def fold(chosen, rounds, iterations):
    """The training step with the fixed fold against the one with a plain Allreduce, in turns.

    Prints the overhead of the fold (median of the rounds' ratios), the same ratio of the fold to
    itself in neighbouring rounds (what of it is noise), and how much of the gradients' exchange is
    hidden behind backward: 1 - (wait at the end of backward) / (exchange by itself).
    """
    settings = chosen.options
    fixed, plain = World(timeout=settings.timeout), World(timeout=settings.timeout, plain=True)
    images, _ = data.open_data(chosen.run["data"], fixed)
    net = start.network(
        chosen.run["network"], images.image_shape, len(images.classes), settings.seed
    )
    net.batchnorm = settings.batchnorm

    def first_batch(world):
        queue = data.MinibatchQueue(images, settings.batch_size, settings.seed, world, prefetch=0)
        return next(queue.epoch(1))

    kinds = {
        "fold": (_Timed(fixed), first_batch(fixed)),
        "plain": (_Timed(plain), first_batch(plain)),
    }

    def seconds(kind, steps):
        timed, batch = kinds[kind]
        step = value_and_grad(model_loss, reduce=timed)
        fixed.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            step(net, *batch)
        fixed.barrier()
        return (time.perf_counter() - began) / steps

    alone = _exchange_alone(fixed, net, kinds["fold"][1], rounds)
    for kind in kinds:
        seconds(kind, 2)
        kinds[kind][0].waits.clear()
    times = {kind: [] for kind in kinds}
    for i in range(rounds):
        for kind in ("fold", "plain") if i % 2 == 0 else ("plain", "fold"):
            times[kind].append(seconds(kind, iterations))
    if fixed.rank:
        return
    ours, theirs = np.array(times["fold"]), np.array(times["plain"])
    print(
        f"{chosen.run['network']}, batch {settings.batch_size}, {fixed.size} rank(s), "
        f"{rounds} rounds of {iterations} steps, in turns"
    )
    print(f"step, fixed fold        {_spread(ours * 1e3)} ms")
    print(f"step, plain Allreduce   {_spread(theirs * 1e3)} ms")
    print(f"overhead of the fold    {_spread((ours / theirs - 1) * 100)} %")
    if rounds > 1:
        print(f"  noise: fold to fold   {_spread((ours[1:] / ours[:-1] - 1) * 100)} %")
    if fixed.size > 1:
        wait = float(np.median(kinds["fold"][0].waits))
        print(
            f"gradient exchange       {alone * 1e3:.2f} ms by itself, {wait * 1e3:.2f} ms of wait "
            f"after backward: {max(0.0, 1 - wait / alone) * 100:.0f} % hidden"
        )


def _exchange_alone(world, net, batch, rounds):
    """Median seconds of the exchange of all gradients with nothing else going on."""
    times = []
    for _ in range(max(rounds, 9)):
        _, gradients, _ = value_and_grad(model_loss)(net, *batch)
        world.barrier()
        began = time.perf_counter()
        world.gplus(gradients)
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def _spread(values):
    return f"{np.median(values):8.2f}  (min {values.min():.2f}, max {values.max():.2f})"
