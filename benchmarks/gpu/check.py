"""`run/gpu-check`: everything that has to be checked and measured on a GPU, in one go.

Each stage is a process of its own with a time of its own; one that takes longer is ended, which is
said, and the rest goes on. What all found is left in a folder, as JSON and as Markdown that fits
docs/BENCHMARKS.md. Exit codes: 0 all passed; 1 a check failed, or was not done; 2 there is no GPU
that can be used.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from benchmarks import machine
from benchmarks.gpu import report
from mpidl.backends.gpu.discovery import visible
from mpidl.cli import verify
from mpidl.cli.arguments import Parser, count
from mpidl.comm import failure
from mpidl.errors import UserError
from mpidl.training.files import model_file
from mpidl.training.options import training_options


class Stage(NamedTuple):
    """seconds: what it may take at most; needed: whether it has to come to its end to pass."""

    name: str
    text: str
    seconds: float
    needed: bool = True


# The last takes what the others leave, too.
STAGES = (
    Stage("machine", "versions; all kernels compile", 90),
    Stage("parity", "each op at the networks' sizes against float64 NumPy", 60),
    Stage("training", "training beside the CPU's, accuracy", 75),
    Stage("identity", "the same bytes on repeats, without graphs, on 1, 2, 4 ranks, resumed", 75),
    Stage("tests", "the kernels' tests", 60, needed=False),
    Stage("sanitizer", "compute-sanitizer", 60, needed=False),
    Stage("timing", "the step beside PyTorch's; kernels by time", 170, needed=False),
)
LIMIT = 590  # seconds in all
GRACE = 3  # more seconds, as a stage that watches its time ends by itself
NAMES = [stage.name for stage in STAGES]


def main(argv=None, see=visible, command=None):
    """Run the stages; returns the exit code. see(): the Visible; command(stage, folder, seconds):
    what starts a stage (tests have their own of both)."""
    chosen = _arguments(argv)
    seen = see()
    if not seen.gpus:
        raise UserError(f"gpu-check needs a GPU that mpidl can compute on: {seen.reason}")
    os.makedirs(chosen.out, exist_ok=True)
    for name in NAMES:
        path = os.path.join(chosen.out, f"{name}.json")
        if name in chosen.stages and os.path.exists(path):
            os.unlink(path)  # of an earlier check
    print(f"{seen.gpus[0].name}; results go to {chosen.out}", flush=True)
    busy, deadline = machine.busy(), time.monotonic() + chosen.limit
    ended, wanted = {}, [stage for stage in STAGES if stage.name in chosen.stages]
    for stage in wanted:
        left = deadline - time.monotonic()
        seconds = left if stage is wanted[-1] else min(stage.seconds, left)
        print(f"== {stage.name}: {stage.text} (at most {max(seconds, 0):.0f} s)", flush=True)
        if seconds < 1:
            ended[stage.name] = "no time left"
        else:
            words = (command or _command)(stage.name, chosen.out, seconds)
            ended[stage.name] = run(words, seconds)
        if ended[stage.name]:
            print(f"  {stage.name}: {ended[stage.name]}", flush=True)
    problems, notes = verdict(chosen.out, wanted, ended)
    _write(chosen.out, ended, {"gpu": seen.gpus[0].name, "busy_before": busy, "failed": problems})
    print(f"written: {os.path.join(chosen.out, 'gpu-check.md')}")
    said = "; ".join(notes)
    if problems:
        print(f"failed: {'; '.join(problems)}" + (f" ({said})" if said else ""))
        return 1
    print(f"all passed{f', but {said}' if said else ''}")
    return 0


def _arguments(argv):
    """Namespace of out, stages and limit. Raises UserError."""
    texts = "\n".join(f"  {stage.name:10}{stage.text}" for stage in STAGES)
    parser = Parser("benchmarks.gpu.check", f"Check and measure on a GPU.\n\n{texts}", False)
    parser.prog = "run/gpu-check"
    default = os.environ.get("OUT") or "gpu-check-results"
    parser.add_argument(
        "--out",
        metavar="DIR",
        default=default,
        help="folder of the results ($OUT, or ./%(default)s)",
    )
    parser.add_argument(
        "--stages",
        metavar="NAME,NAME,...",
        type=_stages,
        default=NAMES,
        help="run these alone (all)",
    )
    parser.add_argument(
        "--limit",
        metavar="SECONDS",
        type=count("--limit"),
        default=LIMIT,
        help="what all may take together (%(default)s)",
    )
    return argparse.Namespace(**vars(parser.parse(argv)))


def _stages(text):
    names = text.split(",")
    for name in names:
        if name not in NAMES:
            known = ", ".join(NAMES)
            hint = training_options.nearest(name, NAMES)
            raise UserError(f"--stages must be of {known}, found {name}{hint}")
    return names


def _command(name, folder, seconds):
    return [sys.executable, "-m", "benchmarks.gpu.stage", name, folder, str(seconds)]


def run(words, seconds):
    """Run a stage with all that it starts; "" or, in words, how it ended otherwise than well."""
    process = subprocess.Popen(
        words, env=verify.environment(), stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        code = process.wait(seconds + GRACE)
        return "" if code in (0, 1) else f"ended with exit code {code}"
    except subprocess.TimeoutExpired:
        return f"out of time, ended after {seconds:.0f} s"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            time.sleep(0.5)
        process.wait()


def verdict(folder, stages, ended):
    """(what failed, what else was not done), as lists of texts."""
    problems, notes = [], []
    for stage in stages:
        found = report.load(folder, stage.name)
        checks = [] if found is None else found["checks"]
        failed = [check["what"] for check in checks if not check["passed"]]
        problems += [f"{stage.name}: {', '.join(failed)}"] if failed else []
        if found is None or not found["finished"]:
            text = f"{stage.name} was not done: {ended.get(stage.name) or 'it ended early'}"
            out_of_time = "time" in (ended.get(stage.name) or "")
            if stage.needed or not out_of_time:
                problems += [] if failed else [text]
            else:
                notes.append(text)
    return problems, notes


def _write(folder, ended, facts):
    """gpu-check.json and gpu-check.md of all stages whose results are there."""
    found = [r for r in (report.load(folder, name) for name in NAMES) if r is not None]
    for one in found:
        if ended.get(one["stage"]):
            one["notes"].append(ended[one["stage"]])
    whole = {"date": time.strftime("%Y-%m-%d"), **facts, "stages": found}
    machine.write_json(os.path.join(folder, "gpu-check.json"), whole)
    head = (
        f"`./run/gpu-check` on one {facts['gpu']}, {whole['date']}: "
        + (f"failed: {'; '.join(facts['failed'])}" if facts["failed"] else "all passed")
        + ".\n\n"
    )
    text = head + report.markdown(found)
    model_file.write_whole(os.path.join(folder, "gpu-check.md"), text.encode())


if __name__ == "__main__":
    failure.run(main)
