"""`python -m benchmarks against CHECKOUT`: compare the training steps of two checkouts.

The steps of this checkout and of CHECKOUT run in separate processes on one core, in turns. A third
process runs the step of this checkout a second time. The difference between the two processes of
this checkout shows the noise of the measurement.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import machine, report, turns
from mpidl.cli import verify
from mpidl.errors import Fault, UserError
from mpidl.training.options import configuration

ROOT = Path(__file__).resolve().parents[1]


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file.

    Raises
    ------
    Fault
        If the two checkouts give different weights.
    """
    machine.refuse_launcher("against")
    if not os.path.isfile(os.path.join(options.checkout, "mpidl", "__init__.py")):
        raise UserError(f"{options.checkout}: expected a checkout of mpidl, found no mpidl/ in it")
    checkouts = {"this": ROOT, "other": options.checkout, "again": ROOT}
    names = ("network", "batch_size", "rounds")
    print(f"{options.network}, batch {options.batch_size}, one thread, {machine.arithmetic()}")
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        with contextlib.ExitStack() as stack:
            sides: dict[object, turns.Side] = {
                name: stack.enter_context(_side(name, path, options, folder))
                for name, path in checkouts.items()
            }
            for side in sides.values():
                side.mean_step(3)
            times = turns.alternate_steps(sides, dict.fromkeys(sides, 5), options.rounds)
            hashes = {name: side.ask("weights")[0] for name, side in sides.items()}
    rows = [["", "ms", "min", "max"]]
    ratios = {}
    for name in checkouts:
        seconds = times[name]
        numbers = report.summary(seconds, 1e3)
        rows.append([name, *(f"{numbers[key]:.3f}" for key in ("median", "min", "max"))])
        pairs = zip(seconds, times["this"], strict=True)
        ratios[name] = report.summary([ours / baseline for ours, baseline in pairs])
    report.print_table(rows)
    for name in ("other", "again"):
        ratio = ratios[name]
        print(f"{name} / this: {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})")
    if len(set(hashes.values())) > 1:
        raise Fault(f"the checkouts computed different weights: {hashes}")
    print(f"the same weights: {hashes['this']}")
    record = report.header(options, configuration.versions_of("one process"), *names)
    return record | {"ratios": ratios, "weights_sha256": hashes["this"]}


def _side(name, checkout, options, folder):
    task = {
        "network": options.network,
        "batch_size": options.batch_size,
        "core": machine.cores_of(1, 1)[0][0],
    }
    environment = verify.environment() | {"PYTHONPATH": str(Path(checkout).resolve())}
    command = [sys.executable, str(ROOT / "benchmarks" / "public_step.py"), json.dumps(task)]
    return turns.Side(name, [command], 1, environment, folder, options.timeout)
