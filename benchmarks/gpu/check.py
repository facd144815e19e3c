"""`run/gpu-check`: run all checks and measurements that need a GPU.

Each stage is a process with a time limit. A stage that exceeds its limit is stopped and reported,
and the remaining stages still run. The results of all stages are written to a folder, as JSON and
as Markdown for docs/BENCHMARKS.md. The exit code is 0 if all checks passed, 1 if a check failed or
did not run, and 2 if there is no usable GPU.
"""

import os
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from benchmarks import report
from mpidl.backends.gpu.discovery import visible
from mpidl.cli.parser import Parser, count
from mpidl.comm import failure, thread_budget
from mpidl.comm.launcher import environment
from mpidl.errors import UserError
from mpidl.files import write_whole
from mpidl.training.options import training_options


class Stage(NamedTuple):
    """A stage with its time limit; a `required` stage must finish for the check to pass."""

    name: str
    text: str
    seconds: float
    required: bool = True


# The last stage also gets the time that the earlier stages did not use.
STAGES = (
    Stage("machine", "versions; all kernels compile", 90),
    Stage("parity", "each op at the networks' sizes against float64 NumPy", 60),
    Stage("training", "training compared with the CPU's; accuracy", 75),
    Stage("identity", "the same bytes on repeats, without graphs, on 1, 2, 4 ranks, resumed", 75),
    Stage("tests", "the kernels' tests", 60, required=False),
    Stage("sanitizer", "compute-sanitizer", 60, required=False),
    Stage(
        "timing", "the step compared with PyTorch's; the time of each kernel", 170, required=False
    ),
)
LIMIT = 590  # total time limit in seconds
GRACE = 3  # extra seconds, so that a stage that watches its time limit can end by itself
NAMES = [stage.name for stage in STAGES]


def main(argv=None, find_gpus=visible, stage_command=None):
    """Run the stages and return the exit code.

    Parameters
    ----------
    argv : sequence of str or None
        Command-line arguments. None means the arguments of this process.
    find_gpus : callable
        Returns the visible GPUs, as `visible` does.
    stage_command : callable or None
        Returns the command line of a stage, given its name, the folder and its time limit in
        seconds.

    Raises
    ------
    UserError
        If there is no GPU, or if an argument is invalid.
    """
    options = _arguments(argv)
    gpus = find_gpus()
    if not gpus.gpus:
        raise UserError(f"gpu-check requires a GPU that mpidl can use: {gpus.reason}")
    gpu = gpus.gpus[0].name
    os.makedirs(options.out, exist_ok=True)
    for name in NAMES:
        path = os.path.join(options.out, f"{name}.json")
        if name in options.stages and os.path.exists(path):
            os.unlink(path)  # left by an earlier check
    print(f"{gpu}; results go to {options.out}", flush=True)
    busy, deadline = thread_budget.busy_share(), time.monotonic() + options.limit
    outcomes, stages = {}, [stage for stage in STAGES if stage.name in options.stages]
    for stage in stages:
        left = deadline - time.monotonic()
        seconds = left if stage is stages[-1] else min(stage.seconds, left)
        print(f"== {stage.name}: {stage.text} (at most {max(seconds, 0):.0f} s)", flush=True)
        if seconds < 1:
            outcomes[stage.name] = "no time left"
        else:
            command = (stage_command or _command)(stage.name, options.out, seconds)
            outcomes[stage.name] = run(command, seconds)
        if outcomes[stage.name]:
            print(f"  {stage.name}: {outcomes[stage.name]}", flush=True)
    problems, notes = verdict(options.out, stages, outcomes)
    _write(options.out, outcomes, {"gpu": gpu, "busy_before": busy, "failed": problems})
    print(f"written: {os.path.join(options.out, 'gpu-check.md')}")
    remarks = "; ".join(notes)
    if problems:
        print(f"failed: {'; '.join(problems)}" + (f" ({remarks})" if remarks else ""))
        return 1
    print(f"all passed{f', but {remarks}' if remarks else ''}")
    return 0


def _arguments(argv):
    """Parse the options --out, --stages and --limit; raise UserError if one is invalid."""
    texts = "\n".join(f"  {stage.name:10}{stage.text}" for stage in STAGES)
    parser = Parser("benchmarks.gpu.check", f"Check and measure on a GPU.\n\n{texts}", False)
    parser.prog = "run/gpu-check"
    default = os.environ.get("OUT") or "gpu-check-results"
    text = "folder for the results ($OUT, or ./%(default)s)"
    parser.text("--out", "DIR", text, default=default)
    parser.text(
        "--stages", "NAME,NAME,...", "run only these stages (all)", default=NAMES, type=_stages
    )
    text = "time limit for all stages in seconds (%(default)s)"
    parser.text("--limit", "SECONDS", text, default=LIMIT, type=count("--limit"))
    return parser.parse(argv)


def _stages(text):
    names = text.split(",")
    for name in names:
        if name not in NAMES:
            hint = training_options.nearest(name, NAMES)
            raise UserError(f"--stages must be among {', '.join(NAMES)}, found {name}{hint}")
    return names


def _command(name, folder, seconds):
    return [sys.executable, "-m", "benchmarks.gpu.stage", name, folder, str(seconds)]


def run(command, seconds):
    """Run a stage, and stop all its processes at the end. Return "" or the reason of a failure."""
    process = subprocess.Popen(
        command, env=environment(), stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        code = process.wait(seconds + GRACE)
        return "" if code in (0, 1) else f"ended with exit code {code}"
    except subprocess.TimeoutExpired:
        return f"out of time, stopped after {seconds:.0f} s"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            time.sleep(0.5)
        process.wait()


def verdict(folder, stages, outcomes):
    """Return two lists of messages: failures, and optional stages that did not finish."""
    problems, notes = [], []
    for stage in stages:
        record = report.load(folder, stage.name)
        checks = [] if record is None else record["checks"]
        failed = [check["what"] for check in checks if not check["passed"]]
        problems += [f"{stage.name}: {', '.join(failed)}"] if failed else []
        if record is None or not record["finished"]:
            outcome = outcomes.get(stage.name) or ""
            text = f"{stage.name} was not done: {outcome or 'it ended early'}"
            if stage.required or "time" not in outcome:
                problems += [] if failed else [text]
            else:
                notes.append(text)
    return problems, notes


def _write(folder, outcomes, facts):
    """Write gpu-check.json and gpu-check.md from the records of all stages that wrote one."""
    records = [r for r in (report.load(folder, name) for name in NAMES) if r is not None]
    for record in records:
        if outcomes.get(record["stage"]):
            record["notes"].append(outcomes[record["stage"]])
    date = time.strftime("%Y-%m-%d")
    path = os.path.join(folder, "gpu-check.json")
    report.write_json(path, {"date": date, **facts, "stages": records})
    state = f"failed: {'; '.join(facts['failed'])}" if facts["failed"] else "all passed"
    head = f"`./run/gpu-check` on one {facts['gpu']}, {date}: {state}.\n\n"
    text = head + report.markdown(records)
    write_whole(os.path.join(folder, "gpu-check.md"), text.encode())


if __name__ == "__main__":
    failure.run(main)
