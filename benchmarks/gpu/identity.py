"""Check that training gives the same weights, byte for byte.

The checks compare repeated runs, runs with and without graphs, runs on several numbers of ranks
that share the GPU, and runs that resume on a different number of ranks. Runs on the same number of
ranks share processes, because starting these takes longer than training.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

from benchmarks.turns import last_message
from mpidl.errors import UserError
from mpidl.launcher import environment, launcher

PRECISIONS = "tf32", "bf16"  # other than fp32


class Run(NamedTuple):
    """A training run: training options, the folder of its checkpoints, and whether to resume."""

    name: str
    options: dict[str, Any]
    out: str | None = None
    resume: bool = False


def check_all(report, start, ranks=(2, 4), checkpoints=True, iterations=90, stop=40):
    """Train repeatedly, and compare the weights and losses.

    Parameters
    ----------
    report : Report
        Receives the checks.
    start : callable
        `start(ranks, runs)` trains on a number of ranks. It returns ({name: {"losses", "sha256"}}
        of the completed runs, the reason why the others are missing).
    ranks : tuple of int
        Numbers of ranks to compare with 1 rank.
    checkpoints : bool
        Whether checkpoints are available, so that runs can be resumed.
    iterations, stop : int
        Iterations of a full run, and of the first part of a resumed run.
    """
    options = {"max_iterations": iterations, "epochs": 1000}
    rounded = {name: options | {"precision": name} for name in PRECISIONS}
    jobs = [(1, [Run("once", options), Run("without graphs", options | {"graphs": "off"})])]
    jobs += [(n, [Run(f"{n} ranks", options)]) for n in ranks]
    repeated = [Run("again", options)]
    for name, values in rounded.items():
        repeated += [Run(name, values), Run(f"{name}, again", values)]
    jobs += [(1, repeated)]
    jobs += [(n, [Run(f"{p}, {n} ranks", rounded[p]) for p in PRECISIONS]) for n in ranks[-1:]]
    pairs = [(n, 1) for n in ranks[:1]] + [(1, n) for n in ranks[-1:]] or [(1, 1)]
    parts = {(a, b): f"{a} rank(s), resumed on {b}" for a, b in pairs if checkpoints}
    for before, after in parts:
        out, name = f"checkpoint-{before}-{after}", parts[before, after]
        _job(jobs, before).append(Run(name, options | {"max_iterations": stop}, out))
        jobs.append((after, [Run(f"{name}, the rest", options, out, True)]))
    runs: dict[str, dict] = {}
    for count, job in jobs:
        results, reason = start(count, job)
        runs |= results
        for run in job:
            if run.name not in results:
                report.check(run.name, False, reason)
        first = runs.get("once")
        if first is None:
            return
        if job is jobs[0][1]:
            report.fact("weights_sha256", f"{first['sha256']} after {iterations} iterations")
        for name in ("again", "without graphs", *(f"{n} ranks" for n in ranks)):
            if name in results:
                _compare(report, first, name, results[name])
        for precision in PRECISIONS:
            for name in (f"{precision}, again", *(f"{precision}, {n} ranks" for n in ranks[-1:])):
                if name in results and precision in runs:
                    _compare(report, runs[precision], name, results[name])
            if precision in results:
                differs = results[precision]["sha256"] != first["sha256"]
                text = "other weights" if differs else "the same weights"
                report.check(f"{precision} is not fp32", differs, text)
        for name in parts.values():
            part, rest = runs.get(name), results.get(f"{name}, the rest")
            if part and rest:
                joined = {"losses": part["losses"] + rest["losses"], "sha256": rest["sha256"]}
                _compare(report, first, f"{name} after iteration {stop}", joined)


def _job(jobs, ranks):
    """Return the runs of the first job on this number of ranks."""
    return next(runs for count, runs in jobs if count == ranks)


def _compare(report, expected, name, run):
    """Check that a run gave the expected bytes."""
    text = "the same weights and losses"
    if run != expected:
        pairs = zip(run["losses"], expected["losses"], strict=False)
        iteration = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), None)
        text = f"weights_sha256 {run['sha256'][:16]}..., expected {expected['sha256'][:16]}..."
        text += "" if iteration is None else f"; losses differ from iteration {iteration} on"
    report.check(name, run == expected, text)


class Starter:
    """A callable for the argument `start` of `check_all`. It runs each job in processes.

    Parameters
    ----------
    folder : str
        Folder for the files that the runs write.
    data : str
        File for `training.load`.
    left : callable
        Returns the time limit for the next job in seconds.
    options : dict
        Training options of all runs.
    network : str
        A value of `--network`.
    """

    def __init__(self, folder, data, left, options, network):
        self.folder, self.data, self.left = folder, data, left
        self.options, self.network = options, network

    def __call__(self, ranks, runs):
        folder = os.path.join(self.folder, "identity")  # its files do not go into the archive
        os.makedirs(folder, exist_ok=True)
        paths = {run.name: os.path.join(folder, f"{run.name}.json") for run in runs}
        described = []
        for run in runs:
            out = None if run.out is None else os.path.join(folder, run.out)
            if out:
                os.makedirs(out, exist_ok=True)
            options = self.options | run.options | {"device": "gpu"}
            entry = {"options": options, "out": out, "resume": run.resume}
            described.append(entry | {"result": paths[run.name]})
        task = {"data": self.data, "network": self.network, "runs": described}
        prefix, reason = launcher(ranks) if ranks > 1 else [], "it was not reached"
        try:
            job = subprocess.run(
                [*prefix, sys.executable, "-m", "benchmarks.gpu.training", json.dumps(task)],
                env=environment(),
                capture_output=True,
                text=True,
                timeout=max(self.left(), 1),
            )
            if job.returncode:
                reason = f"exit code {job.returncode}: {last_message(job.stderr)}"
        except subprocess.TimeoutExpired as late:
            reason = f"not finished after {late.timeout:.0f} s"
        results = {}
        for name, path in paths.items():
            if os.path.exists(path):
                with open(path) as file:
                    results[name] = json.load(file)
        return results, reason


def other_rank_counts(report):
    """Return the possible numbers of ranks above 1. Add a note if there are none."""
    try:
        launcher(2)
        if importlib.util.find_spec("mpi4py") is None:
            raise UserError("mpi4py is not installed")
    except UserError as error:
        report.note(f"only one rank was tested: {error}")
        return ()
    return (2, 4)
