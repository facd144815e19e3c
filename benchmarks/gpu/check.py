"""`run/gpu-check`: run the checks and measurements that need a GPU, in two calls.

Each stage is a process with a time limit. A stage that exceeds its limit is stopped and reported,
and the remaining stages still run. After each stage, the results of the call so far are written to
one archive, as JSON and as Markdown for docs/BENCHMARKS.md, with the output of the stages. The exit
code is 0 if all checks passed, 1 if a check failed or did not run, and 2 if there is no usable GPU.
"""

import glob
import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from typing import NamedTuple

from benchmarks import report
from mpidl.backends.discovery import visible
from mpidl.cli.parser import Parser
from mpidl.errors import UserError
from mpidl.files import write_whole
from mpidl.launcher import environment
from mpidl.ranks import failure, thread_budget
from mpidl.training.options import training_options


class Stage(NamedTuple):
    """A stage with its time limit; a `required` stage must finish for the check to pass."""

    name: str
    text: str
    seconds: float
    required: bool = True


_MACHINE = "versions; all kernels of this call compile"
# {call: stages}. What matters most comes first. The last stage also gets the time that the earlier
# stages did not use.
CALLS = {
    "quick": (
        Stage("machine", _MACHINE, 60),
        Stage("parity", "each op of three networks, and every op, against float64 NumPy", 60),
        Stage("training", "training compared with the CPU's; accuracy", 45),
        Stage("timing", "steps compared with PyTorch's; the time of each kernel", 85, False),
    ),
    "second": (
        Stage("machine", _MACHINE, 60),
        Stage("memcheck", "memory accesses, by compute-sanitizer", 55, False),
        Stage("racecheck", "races, by compute-sanitizer", 55, False),
        Stage(
            "identity", "the same bytes on repeats, without graphs, on 1, 2, 4 ranks, resumed", 80
        ),
        Stage("tests", "the kernels' tests, with the kernels that training uses", 70, False),
        Stage("timing", "ResNet-50 compared with PyTorch's; the time of each kernel", 80, False),
    ),
}
LIMITS = {"quick": 250, "second": 400}  # total time limits in seconds
GRACE = 3  # extra seconds, so that a stage that watches its time limit can end by itself
NAMES = list(dict.fromkeys(stage.name for stages in CALLS.values() for stage in stages))
PACKED = ("*.json", "*.md", "*.log", "*.txt")


def main(argv=None, find_gpus=visible, stage_command=None):
    """Run the stages and return the exit code.

    Parameters
    ----------
    argv : sequence of str or None
        Command-line arguments. None means the arguments of this process.
    find_gpus : callable
        Returns the visible GPUs, as `visible` does.
    stage_command : callable or None
        Returns the command line of a stage, given its name, the folder, its time limit in seconds,
        the call and the sizes.

    Raises
    ------
    UserError
        If there is no GPU, or if an argument is invalid.
    """
    options = _arguments(argv)
    gpus = find_gpus()
    if not gpus.gpus:
        raise UserError(f"gpu-check requires a GPU that mpidl can use: {gpus.reason}")
    os.makedirs(options.out, exist_ok=True)
    calls = [call for call in CALLS if getattr(options, call)] or list(CALLS)
    calls = [call for call in calls if {stage.name for stage in CALLS[call]} & {*options.stages}]
    if not calls:
        raise UserError(f"--stages {','.join(options.stages)}: not a stage of this call")
    codes = [_call(call, options, gpus.gpus[0].name, stage_command or _command) for call in calls]
    return max(codes)


def _call(call, options, gpu, stage_command):
    """Run the stages of a call, and return the exit code."""
    limit, archive = options.limit or LIMITS[call], os.path.join(options.out, f"{call}.tar")
    print(f"{gpu}; results go to {archive}", flush=True)
    busy, deadline = thread_budget.busy_share(), time.monotonic() + limit
    outcomes: dict[str, str] = {}
    stages = [stage for stage in CALLS[call] if stage.name in options.stages]
    with tempfile.TemporaryDirectory(prefix="mpidl-gpu-check-") as folder:
        for stage in stages:
            left = deadline - time.monotonic()
            seconds = min(stage.seconds * limit / LIMITS[call], left)
            seconds = left if stage is stages[-1] else seconds
            print(f"== {stage.name}: {stage.text} (at most {max(seconds, 0):.0f} s)", flush=True)
            if seconds < 1:
                outcomes[stage.name] = "no time left"
            else:
                words = stage.name, folder, seconds, call, "small" if options.small else "full"
                log = os.path.join(folder, f"{stage.name}.log")
                outcomes[stage.name] = run(stage_command(*words), seconds, log)
            if outcomes[stage.name]:
                print(f"  {stage.name}: {outcomes[stage.name]}", flush=True)
            is_last = stage is stages[-1]
            problems, notes = verdict(folder, stages, outcomes, is_last)
            _write(folder, call, outcomes, {"gpu": gpu, "busy_before": busy, "failed": problems})
            pack(folder, archive)
    print(f"written: {archive}")
    remarks = "; ".join(notes)
    if problems:
        print(f"failed: {'; '.join(problems)}" + (f" ({remarks})" if remarks else ""))
        return 1
    print(f"all passed{f', but {remarks}' if remarks else ''}", flush=True)
    return 0


def _arguments(argv):
    """Parse the options; raise UserError if one is invalid."""
    texts = "\n".join(
        f"  {call:9}{stage.name:10}{stage.text}" for call in CALLS for stage in CALLS[call]
    )
    parser = Parser("benchmarks.gpu.check", f"Check and measure on a GPU.\n\n{texts}", False)
    parser.prog = "run/gpu-check"
    for call, text in (("quick", "the first call"), ("second", "the second call")):
        parser.add_argument(f"--{call}", action="store_true", help=f"run only {text}")
    default = os.environ.get("OUT") or "gpu-check-results"
    text = "folder for the archives quick.tar and second.tar ($OUT, or ./%(default)s)"
    parser.text("--out", "DIR", text, default=default)
    parser.text(
        "--stages", "NAME,NAME,...", "run only these stages (all)", default=NAMES, type=_stages
    )
    limits = ", ".join(f"{call} {seconds}" for call, seconds in LIMITS.items())
    text = f"time limit of a call in seconds, by which the stages' limits scale ({limits})"
    parser.number("--limit", text, metavar="SECONDS", default=None)
    text = "small networks and data, PyTorch on the CPU: a try of the check, not of the GPU"
    parser.add_argument("--small", action="store_true", help=text)
    return parser.parse(argv)


def _stages(text):
    names = text.split(",")
    for name in names:
        if name not in NAMES:
            hint = training_options.nearest(name, NAMES)
            raise UserError(f"--stages must be among {', '.join(NAMES)}, found {name}{hint}")
    return names


def _command(name, folder, seconds, call, sizes):
    words = name, folder, str(seconds), call, sizes
    return [sys.executable, "-u", "-m", "benchmarks.gpu.stage", *words]


def run(command, seconds, log):
    """Run a stage, and stop all its processes at the end. Return "" or the reason of a failure.

    The output is printed and written to the file `log`.
    """
    process = subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    copier = threading.Thread(target=_copy_lines, args=(process.stdout, log), daemon=True)
    copier.start()
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
        copier.join(2)


def _copy_lines(source, path):
    with source, open(path, "wb") as log:
        for line in source:
            log.write(line)
            log.flush()
            print(line.decode(errors="replace"), end="", flush=True)


def verdict(folder, stages, outcomes, is_last=True):
    """Return two lists of messages: failures, and optional stages that did not finish.

    Unless `is_last`, stages without an outcome are still to come.
    """
    problems, notes = [], []
    for stage in stages:
        if stage.name not in outcomes and not is_last:
            continue
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


def _write(folder, call, outcomes, facts):
    """Write gpu-check.json and gpu-check.md from the records of all stages that wrote one."""
    names = [stage.name for stage in CALLS[call]]
    records = [r for r in (report.load(folder, name) for name in names) if r is not None]
    for record in records:
        if outcomes.get(record["stage"]):
            record["notes"].append(outcomes[record["stage"]])
    date = time.strftime("%Y-%m-%d")
    path = os.path.join(folder, "gpu-check.json")
    report.write_json(path, {"call": call, "date": date, **facts, "stages": records})
    state = f"failed: {'; '.join(facts['failed'])}" if facts["failed"] else "all passed"
    head = f"`./run/gpu-check --{call}` on one {facts['gpu']}, {date}: {state}.\n\n"
    text = head + report.markdown(records)
    write_whole(os.path.join(folder, "gpu-check.md"), text.encode())


def pack(folder, archive):
    """Write the results in a folder to an archive, which replaces an earlier one at once."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for path in sorted(
            p for pattern in PACKED for p in glob.glob(os.path.join(folder, pattern))
        ):
            tar.add(path, os.path.basename(path))
    write_whole(archive, content.getvalue())


if __name__ == "__main__":
    failure.run(main)
