"""The part `audit` of `python -m benchmarks certify`: the run's time against the audit's.

A job of several ranks trains 100 iterations with a certificate and keeps the checkpoint of
iteration 50. Then one rank audits iterations 50 to 100. The job's time is that of its iterations
with their states; the audit's is that of the replay, and that of the whole command, which also
digests all images and reads the checkpoints.
"""

import argparse
import os
import re
import subprocess
import sys
import time

from benchmarks import input_memory, report, subject
from mpidl.data.formats import packing
from mpidl.errors import Fault
from mpidl.launcher import environment, launcher
from mpidl.report import run_files

INTERVAL, BATCH = 50, 128  # iterations of the audit, images per mini-batch
REPLAY = re.compile(rf"iterations {INTERVAL}-{2 * INTERVAL} +equal +([0-9.]+) s")
JOB, REPLAYED, COMMAND = "job", "replay", "command"


def measure_audit(options: argparse.Namespace, folder: str) -> dict:
    """Measure audits of networks.

    Returns
    -------
    dict
        By network: seconds of the job's iterations, of the replay, and of the command `audit`.
    """
    record = {}
    for name in options.networks:
        shape = subject.network(name).input_shape
        store = input_memory.RepeatedImages(shape[1], INTERVAL * BATCH, subject.CLASSES)
        data = os.path.join(folder, f"audit-{name}.h5")
        packing.pack({"train": store}, data)
        times: dict[str, list[float]] = {JOB: [], REPLAYED: [], COMMAND: []}
        for number in range(options.rounds):
            out = os.path.join(folder, f"audit-{name}-{number}")
            for side, seconds in _measure(name, data, shape, out, options.ranks).items():
                times[side].append(seconds)
        record[name] = {"seconds": times, "ranks": options.ranks}
        print(f"{name}: {INTERVAL} iterations of {BATCH} images on {options.ranks} ranks, audited")
        report.print_table([[f"  {s}", report.spread(times[s]), "s"] for s in times], left=1)
    return record


def _measure(name, data, shape, out, ranks):
    """Train a job, audit it on one rank, and return the seconds of each side."""
    colour = ("--colour", "gray") if shape[0] == 1 else ()
    words = ["--network", name, "--data", data, *colour, "--batch-size", str(BATCH), "--out", out]
    words += ["--test-fraction", "0", "--epochs", "2", "--plots", "none", "--verbose", "off"]
    words += ["--certify", "public", "--checkpoint-keep", str(INTERVAL)]
    words += ["--batchnorm-statistics", "moving"]
    _run([*launcher(ranks), sys.executable, "-m", "mpidl.train", *words])
    records = [r for r in run_files.read_records(out) if r["kind"] == "iteration"]
    seconds = {r["iteration"]: r["seconds"] for r in records}
    start_time = time.perf_counter()
    words = [out, "--data", data, "--steps", f"{INTERVAL}:{2 * INTERVAL}"]
    output = _run([sys.executable, "-m", "mpidl.audit", *words])
    total = time.perf_counter() - start_time
    match = REPLAY.search(output)
    if match is None:
        raise Fault(f"audit: expected equal iterations, found {output}")
    job_seconds = seconds[2 * INTERVAL] - seconds[INTERVAL]
    return {JOB: job_seconds, REPLAYED: float(match[1]), COMMAND: total}


def _run(command):
    result = subprocess.run(
        command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if result.returncode:
        raise Fault(f"exit code {result.returncode}: {(result.stdout + result.stderr)[-1000:]}")
    return result.stdout
