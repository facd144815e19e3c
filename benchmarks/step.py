"""`python -m benchmarks step`: time the parts of the training step, and its scaling over ranks."""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks import machine, ours, report, subject, turns
from benchmarks.mpidl_step import EagerStep, TrainStep
from mpidl.backends.cpu import builds
from mpidl.errors import UserError
from mpidl.ranks.world import World
from mpidl.training.options import configuration


def main(options: argparse.Namespace) -> dict | None:
    """Run the benchmark and return its results for the JSON file."""
    if options.ranks and machine.is_launched():
        raise UserError("--ranks starts the ranks itself: run it without mpirun")
    return measure_scaling(options) if options.ranks else measure_parts(options)


def measure_parts(options: argparse.Namespace) -> dict | None:
    """Time the parts of a step on the current ranks; return the results on rank 0."""
    notes = subject.configure(options)
    world = World(timeout=options.timeout)
    net = subject.network(options.network, options.image, options.seed)
    batch = subject.mini_batch(net.input_shape, options.batch_size, options.seed)
    step = EagerStep(net, batch, world)
    replayed = TrainStep(
        subject.network(options.network, options.image, options.seed), batch, world
    )
    for _ in range(2):
        replayed()  # the first two steps are recorded and checked
    peak_mib = world.gop("max", machine.peak_of_steps(step, 3) / 2**20)
    times, part_times = [], {name: [] for name in vars(step.times)}
    replayed_times = []
    for _ in range(options.rounds):
        world.barrier()
        step.times.clear()
        times.append(np.mean(turns.timed_steps(step, options.iterations, world.barrier)))
        for name, seconds in vars(step.times).items():
            part_times[name].append(np.mean(seconds[1:]))
        seconds = turns.timed_steps(replayed, options.iterations, world.barrier)
        replayed_times.append(np.mean(seconds))
    kernels = profile(step, options.iterations)
    outside = {
        "eager": outside_kernels(step, options.iterations),
        "replayed": outside_kernels(replayed, options.iterations),
    }
    slowest = world.gop("max", np.array(times))
    if world.rank:
        return None
    ms = {"step": report.summary(slowest, 1e3)}
    ms |= {name: report.summary(seconds, 1e3) for name, seconds in part_times.items()}
    ms["replayed step of dl.train"] = report.summary(replayed_times, 1e3)
    images = options.batch_size / report.median(slowest)
    text = f"{world.size} rank(s), {machine.arithmetic()}, {options.rounds} rounds of "
    subject.print_head(options, f"{text}{options.iterations} steps", notes)
    rows = [["", "ms", "min", "max"]]
    for name, part in ms.items():
        title = "  part spent waiting" if name == "wait" else name
        rows.append([title, *(f"{part[key]:.3f}" for key in ("median", "min", "max"))])
    report.print_table(rows)
    print(f"{images:.0f} images/s; a step adds up to {peak_mib:.1f} MiB of memory per rank")
    share = None
    if kernels is not None:
        kernel_ms = sum(kernel["ms"] for kernel in kernels.values())
        share = kernel_ms / ms["step"]["median"]
        rows = [["in C kernels", f"{kernel_ms:.3f} ms", f"{share * 100:.0f} % of a step"]]
        for name, kernel in sorted(kernels.items(), key=lambda item: -item[1]["ms"]):
            rows.append([f"  {name}", f"{kernel['ms']:.3f} ms", f"{kernel['calls']:g} calls"])
        report.print_table(rows)
        print(
            f"CPU time outside kernels: {outside['eager']:.3f} ms a step, replayed "
            f"{outside['replayed']:.3f} ms"
        )
    versions = configuration.versions_of(world.transport.MPI.Get_library_version())
    names = ("network", "batch_size", "threads", "precision", "winograd")
    return report.header(options, versions, *names) | {
        "ranks": world.size,
        "ms": ms,
        "images_per_second": images,
        "peak_mib": peak_mib,
        "kernels": kernels,
        "kernel_share": share,
        "ms_outside_kernels": outside,
    }


def profile(step: EagerStep, count: int) -> dict[str, dict] | None:
    """Run `count` steps and measure the time in each C function.

    Return {name: {"ms": ..., "calls": ...}} per step, or None without C kernels.
    """
    library = builds.kernels()
    if library is None:
        for _ in range(count):
            step()  # other ranks may have kernels and wait for this rank
        return None
    with timed_kernels(time.perf_counter) as totals:
        for _ in range(count):
            step()
    return {k: {"ms": s / count * 1e3, "calls": n / count} for k, (n, s) in totals.items()}


def outside_kernels(step: EagerStep, count: int) -> float:
    """Run `count` steps; return the main thread's CPU time outside C functions, in ms per step.

    The value is the median over the steps. With several ranks, it includes waiting time.
    """
    times = []
    for _ in range(count):
        with timed_kernels(time.thread_time) as totals:
            start = time.thread_time()
            step()
            seconds = time.thread_time() - start
        times.append(seconds - sum(kernel_seconds for _, kernel_seconds in totals.values()))
    return float(np.median(times)) * 1e3


@contextlib.contextmanager
def timed_kernels(clock: Callable[[], float]) -> Iterator[dict[str, list]]:
    """Yield {name: [calls, seconds]} of the C functions called in the `with` block."""
    library, totals = builds.kernels(), {}
    if library is None:
        yield totals
        return

    def timed(name, function):
        def run(*arguments):
            start = clock()
            value = function(*arguments)
            seconds = clock() - start
            total = totals.setdefault(name, [0, 0.0])
            total[0], total[1] = total[0] + 1, total[1] + seconds
            return value

        return run

    functions = {k: f for k, f in vars(library).items() if callable(f) and k != "set_hook"}
    try:
        for name, function in functions.items():
            setattr(library, name, timed(name, function))
        yield totals
    finally:
        vars(library).update(functions)


def measure_scaling(options: argparse.Namespace) -> dict:
    """Time a step on several numbers of ranks and threads in turns. Return the results."""
    layouts = {str(layout): layout for layout in options.ranks}
    keywords = {name: layout._asdict() for name, layout in layouts.items()}
    first, training_times = next(iter(layouts)), {name: [] for name in layouts}
    with ours.sides(options, keywords) as sides:
        description = sides[first].ask("describe")[0]
        counts = {name: turns.steps_for(side.mean_step(2)) for name, side in sides.items()}
        times = {name: [] for name in layouts}
        for _, name in turns.alternate(sides, options.rounds):
            times[name].append(sides[name].mean_step(counts[name]))
            if options.train:
                by_rank = sides[name].ask("training", counts[name])
                training_times[name].append(max(map(np.mean, by_rank)))
    cores = {
        name: layout.ranks * (layout.threads or options.threads) for name, layout in layouts.items()
    }
    core_seconds = {name: np.multiply(times[name], cores[name]) for name in layouts}
    efficiency = {
        name: report.median(core_seconds[first] / seconds) for name, seconds in core_seconds.items()
    }
    subject.print_head(options, f"{description['arithmetic']}, {options.rounds} interleaved rounds")
    rows = [["ranks", "ms per step", f"efficiency per core against {first}"]]
    for name, seconds in times.items():
        rows.append([name, report.spread(seconds, 1e3), f"{efficiency[name]:.3f}"])
    report.print_table(rows, left=3)
    fractions = {}
    if options.train:
        rows = [["ranks", "ms per step of dl.train", "its images/s / those of the step"]]
        for name, seconds in training_times.items():
            fractions[name] = report.median(np.divide(times[name], seconds))
            rows.append([name, report.spread(seconds, 1e3), f"{fractions[name]:.3f}"])
        report.print_table(rows, left=3)
    names = ("network", "batch_size", "threads", "precision", "winograd")
    return report.header(options, description["versions"], *names) | {
        "arithmetic": description["arithmetic"],
        "ms": {name: report.summary(seconds, 1e3) for name, seconds in times.items()},
        "efficiency": efficiency,
        "training": fractions,
    }
