"""NVIDIA's compute-sanitizer on our kernels: memory, races, unset memory, barriers."""

import glob
import importlib.util
import os
import shutil
import subprocess
import sys
import time

from mpidl.cli import verify

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 99  # the exit code that the sanitizer is told to end with where it found something


def find():
    """Path of compute-sanitizer, or None: on PATH, in a CUDA toolkit, in pip's packages."""
    places = [shutil.which("compute-sanitizer")]
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for toolkit in [*filter(None, toolkits), *sorted(glob.glob("/usr/local/cuda-*"))[::-1]]:
        places += [
            os.path.join(toolkit, "bin", "compute-sanitizer"),
            os.path.join(toolkit, "compute-sanitizer", "compute-sanitizer"),
        ]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        places += glob.glob(os.path.join(folder, "**", "compute-sanitizer"), recursive=True)
    return next((p for p in places if p and os.path.isfile(p) and os.access(p, os.X_OK)), None)


def check_all(report, program, seconds, tools=TOOLS):
    """Run the small program of `stage` under each tool, as long as there is time."""
    deadline = time.monotonic() + seconds
    for number, tool in enumerate(tools):
        share = (deadline - time.monotonic()) / (len(tools) - number)
        if share < 2:
            report.note(f"{tool}: no time left")
            continue
        _run(report, program, tool, share)


def _run(report, program, tool, seconds):
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND)]
    command += ["--racecheck-report", "all"] if tool == "racecheck" else []
    command += [sys.executable, "-m", "benchmarks.gpu.stage", "small"]
    try:
        done = subprocess.run(
            command,
            env=verify.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        report.note(f"{tool}: not done within {seconds:.0f} s")
        return
    report.check(f"compute-sanitizer {tool}", done.returncode == 0, said(done.stdout))


def said(output):
    """What a run of the sanitizer came to: its summary, and its first finding or the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    own = [line.removeprefix("=========").strip() for line in lines if line.startswith("=====")]
    summary = next((line for line in own if "SUMMARY" in line), None)
    first = next(
        (x for x in own if x and not x.startswith(("COMPUTE-SANITIZER", "ERROR SUMMARY"))), None
    )
    if summary is None:
        return (own or lines or ["no output"])[-1][:300]
    clean = summary.endswith(("0 errors", "(0 errors, 0 warnings)"))
    return summary if clean or first is None else f"{summary}; {first}"[:300]
