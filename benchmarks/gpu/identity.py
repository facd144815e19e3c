"""The same weights, byte for byte: on every repeat, with graphs and without, on any number of ranks
that share the GPU, and after a resume on another number of them."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

from mpidl.cli import verify
from mpidl.errors import UserError

ITERATIONS, STOP = 90, 40  # more than an epoch of 71, whose last mini-batch is smaller; and less


def check_all(report, start, ranks=(2, 4), checkpoints=True, iterations=ITERATIONS, stop=STOP):
    """Compare runs that `start(name, ranks, options, out=None, resume=False)` makes; each gives
    {"losses", "sha256"}, or raises UserError. checkpoints: whether runs can be resumed."""
    options = {"max_iterations": iterations, "epochs": 1000}

    def run(name, *how, **keywords):
        try:
            return start(name, *how, **keywords)
        except UserError as error:
            report.check(name, False, str(error))
            return None

    first = run("once", 1, options)
    if first is None:
        return
    report.fact("weights_sha256", f"{first['sha256']} after {iterations} iterations")
    same = functools.partial(_compare, report, first)
    same("again", run("again", 1, options))
    same("without graphs", run("without graphs", 1, options | {"graphs": "off"}))
    for n in ranks:
        same(f"{n} ranks", run(f"{n} ranks", n, options))
    tf32 = options | {"precision": "tf32"}
    once, again = (run(name, 1, tf32) for name in ("tf32", "tf32, again"))
    if once is not None:
        _compare(report, once, "tf32, again", again)
        other = once["sha256"] != first["sha256"]
        report.check("tf32 is not fp32", other, "other weights" if other else "the same weights")
    if not checkpoints:
        return
    for before, after in [(n, 1) for n in ranks[:1]] + [(1, n) for n in ranks[-1:]] or [(1, 1)]:
        out, name = f"checkpoint-{before}-{after}", f"{before} rank(s), resumed on {after}"
        begun = run(name, before, options | {"max_iterations": stop}, out=out)
        ended = begun and run(f"{name}, the rest", after, options, out=out, resume=True)
        if ended:
            joined = {"losses": begun["losses"] + ended["losses"], "sha256": ended["sha256"]}
            same(f"{name} after iteration {stop}", joined)


def _compare(report, expected, what, found):
    """A check that a run came to the same bytes, unless it came to nothing."""
    if found is None:
        return
    text = "the same weights and losses"
    if found != expected:
        pairs = zip(found["losses"], expected["losses"], strict=False)
        where = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), None)
        text = f"weights_sha256 {found['sha256'][:16]}..., expected {expected['sha256'][:16]}..."
        text += "" if where is None else f"; losses differ from iteration {where} on"
    report.check(what, found == expected, text)


class Starter:
    """Starts runs as processes: what `check_all` takes as `start`.

    folder: for what they write; data: the file of `training.digits`; left(): seconds that a run may
    take at most.
    """

    def __init__(self, folder, data, left):
        self.folder, self.data, self.left = folder, data, left

    def __call__(self, name, ranks, options, out=None, resume=False):
        result = os.path.join(self.folder, f"{name.replace(' ', '-')}.json")
        what = {
            "data": self.data,
            "options": options | {"device": "gpu"},
            "out": None if out is None else os.path.join(self.folder, out),
            "resume": resume,
            "result": result,
        }
        if what["out"]:
            os.makedirs(what["out"], exist_ok=True)
        launcher = verify.launcher(ranks) if ranks > 1 else []
        module = "benchmarks.gpu.training"
        try:
            done = subprocess.run(
                [*launcher, sys.executable, "-m", module, json.dumps(what)],
                env=verify.environment(),
                capture_output=True,
                text=True,
                timeout=max(self.left(), 1),
            )
        except subprocess.TimeoutExpired as late:
            raise UserError(f"not done after {late.timeout:.0f} s") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            text = next((x for x in lines if x.startswith("mpidl: ")), lines[-1])
            raise UserError(f"exit code {done.returncode}: {text}")
        with open(result) as file:
            return json.load(file)


def ranks_here(report):
    """The numbers of ranks that can be started beside 1, and a note where that is none."""
    try:
        verify.launcher(2)
        if importlib.util.find_spec("mpi4py") is None:
            raise UserError("mpi4py is not installed")
    except UserError as why:
        report.note(f"one rank alone: {why}")
        return ()
    return (2, 4)
