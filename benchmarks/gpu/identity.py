"""Check that training gives the same weights, byte for byte.

The checks compare repeated runs, runs with and without graphs, runs on several numbers of ranks
that share the GPU, and runs that resume on a different number of ranks.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys

from benchmarks.turns import last_message
from mpidl.comm.launcher import environment, launcher
from mpidl.errors import UserError

# An epoch has 71 iterations and ends with a smaller mini-batch. Only ITERATIONS exceeds an epoch.
ITERATIONS, STOP = 90, 40


def check_all(report, start, ranks=(2, 4), checkpoints=True, iterations=ITERATIONS, stop=STOP):
    """Run trainings and compare their weights and losses.

    Parameters
    ----------
    report : Report
        Receives the checks.
    start : callable
        `start(name, ranks, options, out=None, resume=False)` runs a training and returns
        {"losses", "sha256"}, or raises UserError.
    ranks : tuple of int
        Numbers of ranks to compare with 1 rank.
    checkpoints : bool
        Whether checkpoints are available, so that runs can be resumed.
    iterations, stop : int
        Iterations of a full run, and of the first part of a resumed run.
    """
    options = {"max_iterations": iterations, "epochs": 1000}

    def run(name, *args, **keywords):
        try:
            return start(name, *args, **keywords)
        except UserError as error:
            report.check(name, False, str(error))
            return None

    first = run("once", 1, options)
    if first is None:
        return
    report.fact("weights_sha256", f"{first['sha256']} after {iterations} iterations")
    compare = functools.partial(_compare, report, first)
    compare("again", run("again", 1, options))
    compare("without graphs", run("without graphs", 1, options | {"graphs": "off"}))
    for n in ranks:
        compare(f"{n} ranks", run(f"{n} ranks", n, options))
    tf32 = options | {"precision": "tf32"}
    tf32_first, tf32_second = (run(name, 1, tf32) for name in ("tf32", "tf32, again"))
    if tf32_first is not None:
        _compare(report, tf32_first, "tf32, again", tf32_second)
        differs = tf32_first["sha256"] != first["sha256"]
        report.check(
            "tf32 is not fp32", differs, "other weights" if differs else "the same weights"
        )
    if not checkpoints:
        return
    for before, after in [(n, 1) for n in ranks[:1]] + [(1, n) for n in ranks[-1:]] or [(1, 1)]:
        out, name = f"checkpoint-{before}-{after}", f"{before} rank(s), resumed on {after}"
        part = run(name, before, options | {"max_iterations": stop}, out=out)
        rest = part and run(f"{name}, the rest", after, options, out=out, resume=True)
        if rest:
            joined = {"losses": part["losses"] + rest["losses"], "sha256": rest["sha256"]}
            compare(f"{name} after iteration {stop}", joined)


def _compare(report, expected, name, run):
    """Check that a run gave the expected bytes. Skip a failed run (None), reported earlier."""
    if run is None:
        return
    text = "the same weights and losses"
    if run != expected:
        pairs = zip(run["losses"], expected["losses"], strict=False)
        iteration = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), None)
        text = f"weights_sha256 {run['sha256'][:16]}..., expected {expected['sha256'][:16]}..."
        text += "" if iteration is None else f"; losses differ from iteration {iteration} on"
    report.check(name, run == expected, text)


class Starter:
    """A callable for the argument `start` of `check_all`. It runs each training in processes.

    Parameters
    ----------
    folder : str
        Folder for the files that the runs write.
    data : str
        File for `training.digits`.
    left : callable
        Returns the time limit of the next run in seconds.
    """

    def __init__(self, folder, data, left):
        self.folder, self.data, self.left = folder, data, left

    def __call__(self, name, ranks, options, out=None, resume=False):
        result = os.path.join(self.folder, f"{name.replace(' ', '-')}.json")
        task = {
            "data": self.data,
            "options": options | {"device": "gpu"},
            "out": None if out is None else os.path.join(self.folder, out),
            "resume": resume,
            "result": result,
        }
        if task["out"]:
            os.makedirs(task["out"], exist_ok=True)
        prefix = launcher(ranks) if ranks > 1 else []
        module = "benchmarks.gpu.training"
        try:
            job = subprocess.run(
                [*prefix, sys.executable, "-m", module, json.dumps(task)],
                env=environment(),
                capture_output=True,
                text=True,
                timeout=max(self.left(), 1),
            )
        except subprocess.TimeoutExpired as late:
            raise UserError(f"not finished after {late.timeout:.0f} s") from None
        if job.returncode:
            raise UserError(f"exit code {job.returncode}: {last_message(job.stderr)}")
        with open(result) as file:
            return json.load(file)


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
