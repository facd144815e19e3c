"""`python -m benchmarks step`: time the parts of our training step, and its scaling over ranks."""

import argparse
import time

import numpy as np

from benchmarks import machine, ours, report, subject, turns
from benchmarks.mpidl_step import EagerStep
from mpidl.backends.cpu import builds
from mpidl.comm import World
from mpidl.errors import UserError
from mpidl.training.options import configuration


def main(options: argparse.Namespace) -> dict | None:
    """Run the sub-command and return its record."""
    if options.ranks and machine.is_launched():
        raise UserError("--ranks starts the ranks itself: run it without mpirun")
    return measure_scaling(options) if options.ranks else measure_parts(options)


def measure_parts(options: argparse.Namespace) -> dict | None:
    """Time the parts of a step on the current ranks; return the record on rank 0."""
    notes = subject.configure(options)
    world = World(timeout=options.timeout)
    net = subject.network(options.network, options.image, options.seed)
    batch = subject.mini_batch(net.input_shape, options.batch_size, options.seed)
    step = EagerStep(net, batch, world)
    peak_mib = world.gop("max", machine.peak_of_steps(step, 3) / 2**20)
    times, part_times = [], {name: [] for name in vars(step.times)}
    for _ in range(options.rounds):
        world.barrier()
        step.times.clear()
        times.append(np.mean(turns.timed_steps(step, options.iterations, world.barrier)))
        for name, seconds in vars(step.times).items():
            part_times[name].append(np.mean(seconds[1:]))
    kernels = profile(step, options.iterations)
    slowest = world.gop("max", np.array(times))
    if world.rank:
        return None
    ms = {"step": report.summary(slowest, 1e3)}
    ms |= {name: report.summary(seconds, 1e3) for name, seconds in part_times.items()}
    images = options.batch_size / report.median(slowest)
    text = f"{world.size} rank(s), {machine.arithmetic()}, {options.rounds} rounds of "
    subject.print_head(options, f"{text}{options.iterations} steps", notes)
    rows = [["", "ms", "min", "max"]]
    for name, part in ms.items():
        title = "  part spent waiting" if name == "wait" else name
        rows.append([title, *(f"{part[key]:.3f}" for key in ("median", "min", "max"))])
    report.print_table(rows)
    print(f"{images:.0f} images/s; peak memory {peak_mib:.1f} MiB per rank, on top of that before")
    share = None
    if kernels is not None:
        kernel_ms = sum(kernel["ms"] for kernel in kernels.values())
        share = kernel_ms / ms["step"]["median"]
        rows = [["in C kernels", f"{kernel_ms:.3f} ms", f"{share * 100:.0f} % of a step"]]
        for name, kernel in sorted(kernels.items(), key=lambda item: -item[1]["ms"]):
            rows.append([f"  {name}", f"{kernel['ms']:.3f} ms", f"{kernel['calls']:g} calls"])
        report.print_table(rows)
    versions = configuration.versions_of(world.transport.MPI.Get_library_version())
    names = ("network", "batch_size", "threads", "winograd")
    return report.header(options, versions, *names) | {
        "ranks": world.size,
        "ms": ms,
        "images_per_second": images,
        "peak_mib": peak_mib,
        "kernels": kernels,
        "kernel_share": share,
    }


def profile(step: EagerStep, count: int) -> dict[str, dict] | None:
    """Run `count` steps and measure the time in each C function.

    Return {name: {"ms", "calls"}}, both per step, or None without C kernels.
    """
    library = builds.kernels()
    if library is None:
        for _ in range(count):
            step()  # other ranks may have kernels and wait for this one
        return None
    totals = {}

    def timed(name, function):
        def run(*arguments):
            start = time.perf_counter()
            value = function(*arguments)
            seconds = time.perf_counter() - start
            total = totals.setdefault(name, [0, 0.0])
            total[0], total[1] = total[0] + 1, total[1] + seconds
            return value

        return run

    functions = {k: f for k, f in vars(library).items() if callable(f) and k != "set_hook"}
    try:
        for name, function in functions.items():
            setattr(library, name, timed(name, function))
        for _ in range(count):
            step()
    finally:
        vars(library).update(functions)
    return {k: {"ms": s / count * 1e3, "calls": n / count} for k, (n, s) in totals.items()}


def measure_scaling(options: argparse.Namespace) -> dict:
    """Time a step on several numbers of ranks in turns; return the record."""
    with ours.sides(options, {ranks: {"ranks": ranks} for ranks in options.ranks}) as sides:
        description = sides[options.ranks[0]].ask("describe")[0]
        counts = {ranks: turns.steps_for(side.mean_step(2)) for ranks, side in sides.items()}
        times = turns.alternate_steps(sides, counts, options.rounds)
    first = options.ranks[0]
    efficiency = {
        ranks: report.median(np.array(times[first]) * first / (np.array(seconds) * ranks))
        for ranks, seconds in times.items()
    }
    text = f"{description['arithmetic']}, {options.rounds} interleaved rounds"
    subject.print_head(options, text)
    rows = [["ranks", "ms per step", f"efficiency against {first}"]]
    for ranks, seconds in times.items():
        rows.append([str(ranks), report.spread(seconds, 1e3), f"{efficiency[ranks]:.3f}"])
    report.print_table(rows, left=3)
    names = ("network", "batch_size", "threads", "winograd")
    return report.header(options, description["versions"], *names) | {
        "arithmetic": description["arithmetic"],
        "ms": {str(ranks): report.summary(seconds, 1e3) for ranks, seconds in times.items()},
        "efficiency": {str(ranks): value for ranks, value in efficiency.items()},
    }
