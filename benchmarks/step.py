"""`python -m benchmarks step`: our training step by its parts, and how it scales over ranks."""

import contextlib
import tempfile
import time

import numpy as np

from benchmarks import machine, ours, subject, turns
from mpidl.backends.cpu import builds
from mpidl.comm import World
from mpidl.errors import UserError
from mpidl.training.options import configuration


def main(chosen):
    """Run the sub-command; returns its exit code."""
    if chosen.ranks:
        if machine.launched():
            raise UserError("--ranks starts the ranks itself: run it without mpirun")
        result = scaling(chosen)
    else:
        result = parts(chosen)
    if result is not None:
        machine.write_json(chosen.json, result)
    return 0


def parts(chosen):
    """The result of a step by its parts on the ranks that run this; None on all but rank 0."""
    notes = subject.configure(chosen)
    world = World(timeout=chosen.timeout)
    net = subject.network(chosen.network, chosen.image, chosen.seed)
    batch = subject.mini_batch(net.input_shape, chosen.batch_size, chosen.seed)
    step = subject.Step(net, batch, world)
    before = machine.start_of_peak()
    for _ in range(3):
        step()
    peak = world.gop("max", (machine.peak() - before) / 2**20)
    times, of_parts = [], {name: [] for name in vars(step.times)}
    for _ in range(chosen.rounds):
        world.barrier()
        step.times.clear()
        times.append(np.mean(turns.timed_steps(step, chosen.iterations, world.barrier)))
        for name, seconds in vars(step.times).items():
            of_parts[name].append(np.mean(seconds[1:]))
    functions = profile(step, chosen.iterations)
    slowest = world.gop("max", np.array(times))
    if world.rank:
        return None
    versions = configuration.versions_of(world.transport.MPI.Get_library_version())
    ms = {name: machine.summary(seconds, 1e3) for name, seconds in of_parts.items()}
    ms = {"step": machine.summary(slowest, 1e3), **ms}
    images = chosen.batch_size / machine.median(slowest)
    in_kernels = sum(f["ms"] for f in functions.values()) if functions is not None else None
    print(
        f"{chosen.network}, batch {chosen.batch_size}, {world.size} rank(s) x {chosen.threads} "
        f"thread(s), {machine.arithmetic()}, {chosen.rounds} rounds of {chosen.iterations} steps"
    )
    for line in notes:
        print(f"warning: {line}")
    for name, found in ms.items():
        title = "  of which wait" if name == "wait" else name
        print(
            f"{title:16} {found['median']:9.3f} ms  "
            f"(min {found['min']:.3f}, max {found['max']:.3f})"
        )
    print(f"{'images/s':16} {images:9.0f}")
    print(f"{'peak memory':16} {peak:9.1f} MiB a rank, above what it held before the first step")
    if functions is not None:
        share = in_kernels / ms["step"]["median"]
        print(f"{'in C kernels':16} {in_kernels:9.3f} ms of a step, {share * 100:.0f} %")
        for name, f in sorted(functions.items(), key=lambda item: -item[1]["ms"]):
            print(f"  {name:24} {f['ms']:9.3f} ms  {f['calls']:g} calls")
    return machine.facts(chosen, versions) | {
        "network": chosen.network,
        "batch_size": chosen.batch_size,
        "ranks": world.size,
        "threads": chosen.threads,
        "winograd": chosen.winograd,
        "ms": ms,
        "images_per_second": images,
        "peak_mib": peak,
        "kernels": functions,
        "kernel_share": None if functions is None else in_kernels / ms["step"]["median"],
    }


def profile(step, count):
    """{C function: {"ms", "calls"} of a step}; None where NumPy does the arithmetic."""
    library = builds.kernels()
    if library is None:
        for _ in range(count):
            step()  # the other ranks may have a library
        return None
    spent = {}

    def noting(name, function):
        def run(*arguments):
            began = time.perf_counter()
            result = function(*arguments)
            seconds = time.perf_counter() - began
            total = spent.setdefault(name, [0, 0.0])
            total[0], total[1] = total[0] + 1, total[1] + seconds
            return result

        return run

    kept = {k: f for k, f in vars(library).items() if callable(f) and k not in ("set_hook",)}
    try:
        for name, function in kept.items():
            setattr(library, name, noting(name, function))
        for _ in range(count):
            step()
    finally:
        vars(library).update(kept)
    return {k: {"ms": s / count * 1e3, "calls": n / count} for k, (n, s) in spent.items()}


def scaling(chosen):
    """The result of a step on several numbers of ranks, each in its own processes, in turns."""
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder, contextlib.ExitStack() as st:
        sides = {}
        for ranks in chosen.ranks:
            side = ours.side(f"ranks-{ranks}", chosen, folder, ranks=ranks)
            sides[ranks] = st.enter_context(side)
        about = side.ask("about")[0]

        def turn(ranks, count):
            return max(np.mean(seconds) for seconds in sides[ranks].ask("steps", count))

        counts = {ranks: turns.steps_for(turn(ranks, 2)) for ranks in sides}
        times = {ranks: [] for ranks in sides}
        for i in range(chosen.rounds):
            for ranks in list(sides) if i % 2 == 0 else reversed(sides):
                times[ranks].append(turn(ranks, counts[ranks]))
    first = chosen.ranks[0]
    alone = np.array(times[first])
    print(
        f"{chosen.network}, batch {chosen.batch_size}, {chosen.threads} thread(s) a rank, "
        f"{about['arithmetic']}, {chosen.rounds} rounds in turns"
    )
    print(f"{'ranks':8}{'ms a step':38}efficiency against {first}")
    efficiency = {}
    for ranks, found in times.items():
        efficiency[ranks] = machine.median(alone * first / (np.array(found) * ranks))
        print(f"{ranks:<8}{machine.spread(found, 1e3):38}{efficiency[ranks]:.3f}")
    return machine.facts(chosen, about["versions"]) | {
        "arithmetic": about["arithmetic"],
        "network": chosen.network,
        "batch_size": chosen.batch_size,
        "threads": chosen.threads,
        "winograd": chosen.winograd,
        "ms": {str(ranks): machine.summary(found, 1e3) for ranks, found in times.items()},
        "efficiency": {str(ranks): value for ranks, value in efficiency.items()},
    }
