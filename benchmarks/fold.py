"""`python -m benchmarks fold`: measure the cost of the fixed order of sums.

The benchmark compares the training step, which sums in a fixed order (the fold), with a step that
adds from left to right and calls MPI_Allreduce, as other libraries do.
"""

import argparse
import functools

import numpy as np

from benchmarks import machine, ours, report, subject, turns
from benchmarks.mpidl_step import EagerStep, mean_loss
from mpidl.core.grad import value_and_grad
from mpidl.errors import UserError
from mpidl.ranks.world import World
from mpidl.training.options import configuration

TURNS = 5  # turns of each process per round
KINDS = {"fold": False, "plain": True, "again": False}  # {kind: whether it uses MPI_Allreduce}
OPTIONS = ("network", "batch_size", "threads", "batchnorm", "rounds", "iterations")


def main(options: argparse.Namespace) -> dict | None:
    """Run the benchmark and return its results for the JSON file."""
    launched = machine.is_launched()
    if launched and options.ranks:
        raise UserError("--ranks starts the ranks itself: run it without mpirun")
    return measure_this_world(options) if launched else measure_fresh_processes(options)


def measure_fresh_processes(options: argparse.Namespace) -> dict:
    """Time the fold, plain sums, and the fold again as a control; return the results.

    The memory addresses of a process change its times by more than the cost of the fold. Every
    round therefore starts new processes, which take turns.
    """
    times = {}
    for ranks in options.ranks or [1, 2]:
        rounds = [_measure_round(options, ranks) for _ in range(options.rounds)]
        description = rounds[0][1]
        times[ranks] = {kind: np.array([medians[kind] for medians, _ in rounds]) for kind in KINDS}
        if len(times) == 1:
            text = f"{description['arithmetic']}, {options.rounds} rounds of fresh processes"
            subject.print_head(options, text)
        _print_times(ranks, times[ranks])
    return report.header(options, description["versions"], *OPTIONS) | {
        "arithmetic": description["arithmetic"],
        "processes": "fresh",
        **_figures(times),
    }


def _measure_round(options, ranks):
    """Run a round in new processes.

    Return the median seconds per step by kind, and the description of the processes.
    """
    keywords = {kind: {"ranks": ranks, "plain": plain} for kind, plain in KINDS.items()}
    with ours.sides(options, keywords) as sides:
        for side in sides.values():
            side.mean_step(2)
        counts = dict.fromkeys(sides, options.iterations)
        times = turns.alternate_steps(sides, counts, TURNS)
        description = sides["fold"].ask("describe")[0]
    return {kind: report.median(values) for kind, values in times.items()}, description


def measure_this_world(options: argparse.Namespace) -> dict | None:
    """Time fold and plain sums in turns on the current ranks; return the results on rank 0.

    Also measure the fraction of the gradient exchange that overlaps with the backward pass: 1 -
    (wait at the end of backward) / (time of the exchange alone).
    """
    subject.configure(options)
    steps = {}
    for kind in ("fold", "plain"):
        world = World(timeout=options.timeout, plain=KINDS[kind])
        net = subject.network(options.network, options.image, options.seed)
        batch = subject.mini_batch(net.input_shape, options.batch_size, options.seed)
        steps[kind] = EagerStep(net, batch, world, options.batchnorm)
    world = steps["fold"].world
    exchange = _exchange_seconds(steps["fold"], options.rounds)

    def turn(kind, count):
        world.barrier()
        return float(np.mean(turns.timed_steps(steps[kind], count, world.barrier)))

    for kind, step in steps.items():
        turn(kind, 2)
        step.times.clear()
    seconds = {kind: [] for kind in KINDS}
    for _, kind in turns.alternate(KINDS, options.rounds):
        seconds[kind].append(turn("plain" if KINDS[kind] else "fold", options.iterations))
    if world.rank:
        return None
    times = {world.size: {kind: np.array(values) for kind, values in seconds.items()}}
    turns_text = f"{options.rounds} rounds of {options.iterations} steps, in turns"
    subject.print_head(options, f"{machine.arithmetic()}, {turns_text}")
    _print_times(world.size, times[world.size])
    hidden = None
    if world.size > 1:
        wait = report.median(steps["fold"].times.wait)
        hidden = max(0.0, 1 - wait / exchange)
        print(
            f"  gradient exchange: {exchange * 1e3:.2f} ms alone, {wait * 1e3:.2f} ms of waiting "
            f"after the backward pass: {hidden * 100:.0f} % hidden"
        )
    versions = configuration.versions_of(world.transport.MPI.Get_library_version())
    return report.header(options, versions, *OPTIONS) | {
        "processes": "these",
        **_figures(times),
        "hidden": hidden,
    }


def _exchange_seconds(step, rounds):
    """Return the median seconds of an exchange of all gradients while nothing else runs."""
    times = []
    for _ in range(max(rounds, 9)):
        _, gradients, _ = value_and_grad(mean_loss)(step.net, *step.batch)
        step.world.barrier()
        times.append(turns.seconds(functools.partial(step.world.gplus, gradients)))
    return report.median(times)


def _ratios(times):
    """Return (overhead, control) of each round as ratios of step times minus 1.

    The overhead compares fold with plain sums. The control compares the second fold with the first.
    """
    return times["fold"] / times["plain"] - 1, times["again"] / times["fold"] - 1


def _print_times(ranks, times):
    overhead, control = _ratios(times)
    print(f"{ranks} rank(s)")
    rows = [
        ("  step, fixed fold", report.spread(times["fold"], 1e3), "ms"),
        ("  step, plain Allreduce", report.spread(times["plain"], 1e3), "ms"),
        ("  overhead of the fold", report.spread(overhead, 100), "%"),
        ("  a second fold against the first", report.spread(control, 100), "%"),
    ]
    report.print_table(rows, left=3)


def _figures(times):
    """Return the figures for the JSON file, each as a dict by number of ranks."""
    ratios = {str(ranks): _ratios(seconds) for ranks, seconds in times.items()}
    figures: dict[str, dict] = {}
    for i, name in enumerate(("overhead", "control")):
        figures[name] = {ranks: report.median(pair[i]) for ranks, pair in ratios.items()}
        figures[f"{name}_quartiles"] = {
            ranks: np.quantile(pair[i], [0.25, 0.75]).tolist() for ranks, pair in ratios.items()
        }
    figures["ms"] = {
        str(ranks): {kind: report.summary(values, 1e3) for kind, values in seconds.items()}
        for ranks, seconds in times.items()
    }
    return figures
