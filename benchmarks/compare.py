"""`python -m benchmarks compare`: time our step and PyTorch's in turns on the same cores."""

import argparse
import contextlib
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks import (
    machine,
    onednn,
    others,
    ours,
    report,
    subject,
    theirs,
    torch_step,
    torch_versions,
    turns,
)
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
# Largest relative error of a side's first loss. If the losses of two sides differ by more than the
# sum of both errors, the computations differ.
LOSS_ERRORS = {"fp32": 5e-5, "bf16": 2e-2}
STEPS_COMPARED = 3
FLOAT32_SIDE = "mpidl-fp32"  # value of --with: mpidl in float32, beside mpidl in another precision


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    ranks, threads = options.ranks, options.threads
    if not (options.libraries or options.predict or options.torch):
        torch_step.require("compare")
    if options.predict:
        options.libraries = [*options.libraries, "onnxruntime"]
    if options.predict and (ranks > 1 or options.memory):
        raise UserError("--predict: expected one rank, without --ranks and --memory")
    if FLOAT32_SIDE in options.libraries and options.precision == "fp32":
        raise UserError(f"--with {FLOAT32_SIDE}: expected --precision bf16, found fp32")
    if ranks > 1 and options.batch_size % (16 * ranks):
        raise UserError(
            f"--batch-size must be a multiple of {16 * ranks} for {ranks} ranks, so that all "
            f"have the same number of images, found {options.batch_size}"
        )
    sides = other_sides(options)
    held_to = ", AVX2" if options.held_to else ""
    subject.print_head(
        options, f"{ranks} rank(s), cores {machine.cores_of(ranks, threads)}{held_to}"
    )
    if ranks * threads > len(os.sched_getaffinity(0)):
        print(f"warning: {ranks} x {threads} threads share {len(os.sched_getaffinity(0))} core(s)")
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        compare = compare_memory if options.memory else compare_time
        record = compare(options, sides, folder)
    for name, difference in record.get("loss_differences", {}).items():
        errors = [LOSS_ERRORS[p] for p in (options.precision, precision_of(name, options))]
        if not difference <= sum(errors):
            report.write_json(options.json, record)
            raise Fault(
                f"the losses of the first step differ by {difference:.1e}: ours and {name} "
                "compute different results"
            )
    return record


def precision_of(side: str, options: argparse.Namespace) -> str:
    """Return the precision of another side: libraries other than PyTorch compute in float32."""
    return "fp32" if side in options.libraries else options.precision


def our_side(options: argparse.Namespace, folder: str) -> turns.Side:
    """Start our ranks and return their Side."""
    variables = HELD_TO[options.held_to][0]
    return ours.side("ours", options, folder, ranks=options.ranks, variables=variables)


class OtherSide(NamedTuple):
    """Another side of a comparison.

    Attributes
    ----------
    version : str
        The version of PyTorch, or "" for another library.
    start : callable
        Starts the side's processes, given a folder for its files, and returns the Side.
    """

    version: str
    start: Callable[[str], turns.Side]


def other_sides(options: argparse.Namespace) -> dict[str, OtherSide]:
    """Return the other sides by name: PyTorch's variants of each version, then `--with`."""
    variables, sides = HELD_TO[options.held_to][1], {}
    versions = torch_versions.find(options.torch)
    for version, python in versions:
        for variant in options.variants:
            name = variant if len(versions) == 1 else f"{variant} {version}"
            keywords = {"ranks": options.ranks, "variables": variables}
            arguments = name, variant, python, options
            sides[name] = OtherSide(version, functools.partial(theirs.side, *arguments, **keywords))
    keywords = {"ranks": options.ranks, "variables": HELD_TO[options.held_to][0]}
    for name in options.libraries:
        start = functools.partial(others.side, name, options)
        if name == FLOAT32_SIDE:
            start = functools.partial(ours.side, name, options, precision="fp32", **keywords)
        sides[name] = OtherSide("", start)
    return sides


def check_onednn(name: str, side: turns.Side, precision: str) -> dict[str, int]:
    """Return the oneDNN implementations that a side's step uses.

    Raises
    ------
    Fault
        If one of the implementations is reference code.
    Lost
        If oneDNN computes nothing in bfloat16, because the CPU does not have the instructions.
        PyTorch then uses its own code, which is many times slower than its float32.
    """
    counts = side.ask("implementations")[0]
    onednn.refuse_reference(name, counts)
    if precision == "bf16" and not counts:
        raise turns.Lost(name, "oneDNN has no bfloat16 for these CPU instructions")
    return counts


def compare_time(
    options: argparse.Namespace, other_sides: Mapping[str, OtherSide], folder: str
) -> dict:
    """Time all sides in turns and return the results."""
    with contextlib.ExitStack() as stack:
        our = stack.enter_context(our_side(options, folder))
        description = our.ask("describe")[0]
        record = report.header(options, description["versions"]) | {
            "failed": {},
            "onednn": {},
            "losses": {"ours": our.ask("losses", STEPS_COMPARED)[0]},
            "arithmetic": {"ours": description["arithmetic"]},
        }
        sides = {}
        for name, other in other_sides.items():
            start = time.monotonic()
            try:
                side = stack.enter_context(other.start(folder))
                description = side.ask("describe")[0]
                by_rank = side.ask("losses", STEPS_COMPARED)
                if other.version:
                    record["onednn"][name] = check_onednn(name, side, options.precision)
            except turns.Lost as lost:
                record["failed"][name] = lost.reason
                print(f"{name}: failed: {lost.reason}", flush=True)
                continue
            sides[name] = side
            _add_versions(record["versions"], description["versions"])
            record["arithmetic"][name] = description["arithmetic"]
            record["losses"][name] = [math.fsum(x) / len(x) for x in zip(*by_rank, strict=True)]
            print(f"{name}: ready after {time.monotonic() - start:.0f} s", flush=True)
        if not sides:
            raise Fault("nothing to compare with: no other library could be started")
        times = take_turns(our, sides, options.rounds)
    versions = {name: other_sides[name].version for name in sides}
    return record | evaluate(options, times, record["losses"], versions)


def _add_versions(table, versions):
    """Add {package: version} to a table; several versions of a package are joined by commas."""
    for package, version in versions.items():
        parts = [*table.get(package, version).split(", "), version]
        table[package] = ", ".join(dict.fromkeys(parts))


def take_turns(our, sides, rounds):
    """Time each side in turns with ours.

    Parameters
    ----------
    our : Side
        The side of our ranks.
    sides : dict of str to Side
        The other sides by name.
    rounds : int
        Number of turns of each other side. Our side takes a turn next to each of these turns.

    Returns
    -------
    dict of str to list of tuple
        For each side and round: our seconds per step, and the side's seconds per step. Both times
        are means over a turn.
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


def evaluate(
    options: argparse.Namespace,
    times: Mapping[str, list],
    losses: Mapping[str, list],
    versions: Mapping[str, str] | None = None,
) -> dict:
    """Print the table of the times from `take_turns`, and return the entries for the JSON file.

    `versions` has the PyTorch version of each side, and "" for other libraries.
    """
    our_times = [pair[0] for pairs in times.values() for pair in pairs]
    other_times = {name: [pair[1] for pair in pairs] for name, pairs in times.items()}
    ratios = {name: [b / a for a, b in pairs] for name, pairs in times.items()}
    medians = {name: report.median(seconds) for name, seconds in other_times.items()}
    torch = {k: v for k, v in medians.items() if k not in options.libraries}
    libraries = {k: v for k, v in medians.items() if k != FLOAT32_SIDE}
    best = min((libraries if options.predict else torch) or libraries or medians, key=medians.get)
    unit = "pass" if options.predict else "step"
    rows = [["", f"ms per {unit}, {options.rounds} rounds", "theirs / ours"]]
    rows.append(["ours", report.spread(our_times, 1e3), ""])
    for name, seconds in other_times.items():
        rows.append([name, report.spread(seconds, 1e3), report.spread(ratios[name])])
        if precision_of(name, options) != options.precision and name != FLOAT32_SIDE:
            rows[-1][0] += " (fp32)"
    print()
    report.print_table(rows, left=3)
    our_median = report.median(our_times)
    ratio = medians[best] / our_median
    first = {k: abs(v[0] / losses["ours"][0] - 1) for k, v in losses.items() if k != "ours"}
    print(
        f"ratio {ratio:.2f} (turn by turn {min(ratios[best]):.2f} to {max(ratios[best]):.2f}): "
        f"{best} in {precision_of(best, options)} against ours in {options.precision}"
    )
    fastest: dict[str, str] = {}  # {version of PyTorch: its fastest side}
    for name in sorted(torch if versions else (), key=medians.get):
        fastest.setdefault(versions[name], name)
    by_version = {version: medians[name] / our_median for version, name in fastest.items()}
    for version, name in fastest.items() if len(fastest) > 1 else ():
        print(f"PyTorch {version}: ratio {by_version[version]:.2f} ({name})")
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
        "precision",
        "winograd",
        "rounds",
    )
    return {name: getattr(options, name) for name in names} | {
        "ratio": ratio,
        "ratio_min": min(ratios[best]),
        "ratio_max": max(ratios[best]),
        "ratio_by_version": by_version,
        "best_variant": best,
        "ours_ms": our_median * 1e3,
        "ours_ms_spread": report.summary(our_times, 1e3),
        "torch_ms": {k: v * 1e3 for k, v in torch.items()},
        "others_ms": {k: v * 1e3 for k, v in medians.items() if k not in torch},
        "ms_spread": {k: report.summary(v, 1e3) for k, v in other_times.items()},
        "loss_difference": max(first.values()),
        "loss_differences": first,
    }


def compare_memory(
    options: argparse.Namespace, other_sides: Mapping[str, OtherSide], folder: str
) -> dict:
    """Measure the peak memory of each side in fresh processes and return the results."""
    with our_side(options, folder) as our:
        description = our.ask("describe")[0]
        our_mib = sum(our.ask("memory", 3)) / 2**20
    names = ("network", "batch_size", "ranks", "threads", "precision")
    record = report.header(options, description["versions"], *names) | {"failed": {}}
    rows = [["ours", f"{our_mib:.1f} MiB above the memory held before the first step"]]
    other_mib = {}
    for name, other in other_sides.items():
        try:
            with other.start(folder) as side:
                if name == FLOAT32_SIDE:  # measured like ours
                    memory = side.ask("memory", 3)
                else:  # the memory that a library keeps after compilation does not count
                    side.ask("losses", 2)
                    memory = side.ask("memory", 2)
                if other.version:
                    check_onednn(name, side, options.precision)
                other_mib[name] = sum(memory) / 2**20
                rows.append([name, f"{other_mib[name]:.1f} MiB"])
        except turns.Lost as lost:
            record["failed"][name] = lost.reason
            rows.append([name, f"failed: {lost.reason}"])
    report.print_table(rows, left=2)
    if not other_mib:
        raise Fault("nothing to compare with: no variant could be started")
    record["ours_mib"] = our_mib
    if FLOAT32_SIDE in other_mib:
        record["fp32_mib"] = fp32_mib = other_mib.pop(FLOAT32_SIDE)
        print(f"ours in {options.precision} / ours in fp32 {our_mib / fp32_mib:.2f}")
    if not other_mib:
        return record
    smallest = min(other_mib, key=other_mib.get)
    ratio = other_mib[smallest] / our_mib
    print(f"smallest of PyTorch / ours {ratio:.2f} ({smallest}), both in {options.precision}")
    return record | {"torch_mib": other_mib, "least_variant": smallest, "memory_ratio": ratio}
