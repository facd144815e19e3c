"""`python -m benchmarks compare`: time our step and PyTorch's in turns on the same cores."""

import argparse
import contextlib
import math
import os
import tempfile
import time

from benchmarks import machine, others, ours, report, subject, theirs, torch_step, turns
from mpidl.errors import Fault, UserError

# Environment variables that limit mpidl's side and the other side to AVX2.
HELD_TO = {
    None: ({}, {}),
    "avx2": (
        {"MPIDL_CPU": "x86-64-v3", "OPENBLAS_CORETYPE": "Haswell"},
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
}
SAME_LOSS = 1e-4  # a larger relative difference of the first losses means different computations
STEPS_COMPARED = 3


def main(options: argparse.Namespace) -> dict:
    """Run the sub-command and return its record."""
    ranks, threads = options.ranks, options.threads
    if not (options.libraries or options.predict):
        torch_step.require("compare")
    if options.predict:
        options.libraries = [*options.libraries, "onnxruntime"]
    if options.predict and (ranks > 1 or options.memory):
        raise UserError("--predict: expected one rank, and times: leave out --ranks and --memory")
    if ranks > 1 and options.batch_size % (16 * ranks):
        raise UserError(
            f"--batch-size must be a multiple of {16 * ranks} for {ranks} ranks, so that all "
            f"have the same number of images, found {options.batch_size}"
        )
    held_to = ", AVX2" if options.held_to else ""
    subject.print_head(
        options, f"{ranks} rank(s), cores {machine.cores_of(ranks, threads)}{held_to}"
    )
    if ranks * threads > len(os.sched_getaffinity(0)):
        print(f"warning: {ranks} x {threads} threads share {len(os.sched_getaffinity(0))} core(s)")
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        compare = compare_memory if options.memory else compare_time
        record = compare(options, folder)
    if record.get("loss_difference", 0) > SAME_LOSS:
        report.write_json(options.json, record)
        raise Fault(
            f"the losses of the first step differ by {record['loss_difference']:.1e}: the two "
            "sides compute different results"
        )
    return record


def our_side(options: argparse.Namespace, folder: str) -> turns.Side:
    """Start our ranks and return their Side."""
    variables = HELD_TO[options.held_to][0]
    return ours.side("ours", options, folder, ranks=options.ranks, variables=variables)


def other_side(name: str, options: argparse.Namespace, folder: str) -> turns.Side:
    """Start a PyTorch variant or another library and return its Side."""
    if name in options.libraries:
        return others.side(name, options, folder)
    variables = HELD_TO[options.held_to][1]
    return theirs.side(name, options, folder, ranks=options.ranks, variables=variables)


def other_names(options: argparse.Namespace) -> list[str]:
    """Return the names of the other sides: PyTorch's variants, if installed, then libraries."""
    variants = options.variants if torch_step.is_installed() else []
    return [*variants, *options.libraries]


def compare_time(options: argparse.Namespace, folder: str) -> dict:
    """Time all sides in turns and return the record."""
    with contextlib.ExitStack() as stack:
        our = stack.enter_context(our_side(options, folder))
        description = our.ask("describe")[0]
        record = report.header(options, description["versions"]) | {
            "failed": {},
            "losses": {"ours": our.ask("losses", STEPS_COMPARED)[0]},
            "arithmetic": {"ours": description["arithmetic"]},
        }
        sides = {}
        for name in other_names(options):
            start = time.monotonic()
            try:
                side = stack.enter_context(other_side(name, options, folder))
                description = side.ask("describe")[0]
                by_rank = side.ask("losses", STEPS_COMPARED)
            except turns.Lost as lost:
                record["failed"][name] = lost.reason
                print(f"{name}: failed: {lost.reason}", flush=True)
                continue
            sides[name] = side
            record["versions"] |= description["versions"]
            record["arithmetic"][name] = description["arithmetic"]
            record["losses"][name] = [math.fsum(x) / len(x) for x in zip(*by_rank, strict=True)]
            print(f"{name}: ready after {time.monotonic() - start:.0f} s", flush=True)
        if not sides:
            raise Fault("nothing to compare with: no other library could be started")
        times = take_turns(our, sides, options.rounds)
    return record | evaluate(options, times, record["losses"])


def take_turns(our, sides, rounds):
    """Time each side next to ours.

    Parameters
    ----------
    our : Side
        The side of our ranks.
    sides : dict of str to Side
        The other sides by name.
    rounds : int
        Number of turns of each other side. Our side takes a turn next to each of them.

    Returns
    -------
    dict of str to list of tuple
        For each side and round: our seconds per step, and the side's seconds per step. Both are
        means over a turn.
    """
    both = {"ours": our, **sides}
    counts = {name: turns.steps_for(side.mean_step(2)) for name, side in both.items()}
    times = {name: [] for name in sides}
    for number, name in turns.alternate(sides, rounds):
        pair = {}
        for turn in ("ours", name) if number % 2 == 0 else (name, "ours"):
            pair[turn] = both[turn].mean_step(counts[turn])
        times[name].append((pair["ours"], pair[name]))
    return times


def evaluate(options: argparse.Namespace, times: dict, losses: dict) -> dict:
    """Print the table of the times from `take_turns`, and return the record entries for them."""
    our_times = [pair[0] for pairs in times.values() for pair in pairs]
    other_times = {name: [pair[1] for pair in pairs] for name, pairs in times.items()}
    ratios = {name: [b / a for a, b in pairs] for name, pairs in times.items()}
    medians = {name: report.median(seconds) for name, seconds in other_times.items()}
    torch = {k: v for k, v in medians.items() if k not in options.libraries}
    best = min(medians if options.predict else torch or medians, key=medians.get)
    unit = "pass" if options.predict else "step"
    rows = [["", f"ms per {unit}, {options.rounds} rounds", "theirs / ours"]]
    rows.append(["ours", report.spread(our_times, 1e3), ""])
    for name, seconds in other_times.items():
        rows.append([name, report.spread(seconds, 1e3), report.spread(ratios[name])])
    print()
    report.print_table(rows, left=3)
    our_median = report.median(our_times)
    ratio = medians[best] / our_median
    first = {k: abs(v[0] / losses["ours"][0] - 1) for k, v in losses.items() if k != "ours"}
    print(
        f"ratio {ratio:.2f} (turn by turn {min(ratios[best]):.2f} to {max(ratios[best]):.2f}): "
        f"{best} against ours"
    )
    text = f"loss of {unit} 1: {losses['ours'][0]:.8f}; others differ by at most "
    text += f"{max(first.values()):.1e}"
    if options.predict:
        text += f"; ours: {options.batch_size / our_median:.1f} images/s"
    else:
        last = max(abs(v[-1] / losses["ours"][-1] - 1) for v in losses.values())
        text += f", after {STEPS_COMPARED} steps by {last:.1e}"
    print(text)
    names = (
        "network",
        "predict",
        "batch_size",
        "ranks",
        "threads",
        "held_to",
        "winograd",
        "rounds",
    )
    return {name: getattr(options, name) for name in names} | {
        "ratio": ratio,
        "ratio_min": min(ratios[best]),
        "ratio_max": max(ratios[best]),
        "best_variant": best,
        "ours_ms": our_median * 1e3,
        "ours_ms_spread": report.summary(our_times, 1e3),
        "torch_ms": {k: v * 1e3 for k, v in torch.items()},
        "others_ms": {k: v * 1e3 for k, v in medians.items() if k not in torch},
        "ms_spread": {k: report.summary(v, 1e3) for k, v in other_times.items()},
        "loss_difference": max(first.values()),
    }


def compare_memory(options: argparse.Namespace, folder: str) -> dict:
    """Measure the peak memory of each side in fresh processes and return the record."""
    with our_side(options, folder) as our:
        description = our.ask("describe")[0]
        our_mib = sum(our.ask("memory", 3)) / 2**20
    names = ("network", "batch_size", "ranks", "threads")
    record = report.header(options, description["versions"], *names) | {"failed": {}}
    rows = [["ours", f"{our_mib:.1f} MiB above the memory held before the first step"]]
    other_mib = {}
    for name in other_names(options):
        try:
            with other_side(name, options, folder) as side:
                side.ask("losses", 2)
                other_mib[name] = sum(side.ask("memory", 2)) / 2**20
                rows.append([name, f"{other_mib[name]:.1f} MiB"])
        except turns.Lost as lost:
            record["failed"][name] = lost.reason
            rows.append([name, f"failed: {lost.reason}"])
    report.print_table(rows, left=2)
    if not other_mib:
        raise Fault("nothing to compare with: no variant could be started")
    smallest = min(other_mib, key=other_mib.get)
    ratio = other_mib[smallest] / our_mib
    print(f"smallest of PyTorch / ours {ratio:.2f} ({smallest})")
    return record | {
        "ours_mib": our_mib,
        "torch_mib": other_mib,
        "least_variant": smallest,
        "memory_ratio": ratio,
    }
