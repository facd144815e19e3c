"""`python -m benchmarks sweep`: compare training models in parallel and one after another.

Three sides take turns: a sweep with one group per rank, a sequence of `mpidl.train` commands on all
ranks, and a sweep with one group of all ranks, which starts only one job. All sides must
give the same weights.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np
import tomli_w

from benchmarks import machine, report, turns
from mpidl.errors import Fault
from mpidl.launcher import environment, launcher
from mpidl.training.options import configuration

SIDES = ("groups of 1", "one after another", "one group")
OPTIONS = ("network", "ranks", "models", "iterations", "rounds")


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file.

    Raises
    ------
    Fault
        If a training run fails, or if the sides give different weights.
    """
    machine.refuse_launcher("sweep")
    print(
        f"{options.models} models of {options.network}, {options.iterations} iterations each, "
        f"{options.ranks} ranks, {machine.arithmetic()}"
    )
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    hashes = {}
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        for number, side in turns.alternate(SIDES, options.rounds):
            out = os.path.join(folder, f"{number}-{SIDES.index(side)}")
            start = time.perf_counter()
            _run(side, options, out)
            times[side].append(time.perf_counter() - start)
            hashes[number, side] = tuple(_hashes(out, options.models))
            print(f"round {number + 1}, {side}: {times[side][-1]:.1f} s", flush=True)
    if len(set(hashes.values())) > 1:
        raise Fault("the sides computed different weights")
    rows = [["", "s", "min", "max", "models/minute"]]
    for side in SIDES:
        numbers = report.summary(times[side])
        cells = [f"{numbers[key]:.2f}" for key in ("median", "min", "max")]
        rows.append([side, *cells, f"{60 * options.models / numbers['median']:.1f}"])
    report.print_table(rows)
    ratios = {side: report.summary(np.divide(times[SIDES[0]], times[side])) for side in SIDES[1:]}
    for side, ratio in ratios.items():
        low, middle, high = (ratio[key] for key in ("min", "median", "max"))
        print(f"{SIDES[0]} / {side}: {middle:.3f} ({low:.3f} to {high:.3f})")
    print(f"the same weights of {options.models} models in {len(hashes)} sweeps")
    record = report.header(options, configuration.versions_of("mpirun"), *OPTIONS)
    return record | {"seconds": times, "ratios": ratios}


def _run(side, options, out):
    """Train all models; raise Fault if a command fails."""
    os.mkdir(out)
    common = {"network": options.network, "max_iterations": options.iterations}
    common |= {"threads": 1, "plots": "none"}
    if side == "one after another":
        for seed in range(options.models):
            flags = [w for name, value in common.items() for w in (_flag(name), str(value))]
            path = os.path.join(out, f"trial-{seed + 1:03}")
            _call(options, "mpidl.train", *flags, "--seed", str(seed), "--out", path)
        return
    file = os.path.join(out, "sweep.toml")
    with open(file, "wb") as target:
        tomli_w.dump({"train": common, "grid": {"seed": list(range(options.models))}}, target)
    size = "1" if side == "groups of 1" else str(options.ranks)
    _call(options, "mpidl.sweep", file, "--out", out, "--ranks-per-model", size)


def _flag(name):
    return f"--{name.replace('_', '-')}"


def _call(options, module, *words):
    command = [*launcher(options.ranks), sys.executable, "-m", module, *words]
    process = subprocess.run(
        command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if process.returncode:
        message = turns.last_message(process.stderr + process.stdout)
        raise Fault(f"{module} ended with exit code {process.returncode}: {message}")


def _hashes(out, count):
    for number in range(1, count + 1):
        with open(os.path.join(out, f"trial-{number:03}", "summary.json")) as file:
            yield json.load(file)["weights_sha256"]
