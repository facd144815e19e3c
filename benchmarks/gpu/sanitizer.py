"""Check mpidl's kernels with NVIDIA's compute-sanitizer: memory accesses, races, barriers."""

import glob
import importlib.util
import os
import shutil
import subprocess
import sys
import time

from mpidl.comm.launcher import environment

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ERROR_CODE = 99  # exit code of the sanitizer if it finds an error


def find():
    """Search PATH, CUDA toolkits and pip's packages for compute-sanitizer; return its path.

    Return None if compute-sanitizer is not found.
    """
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
    """Run the program `small` of `stage` under each tool, within a time limit in seconds."""
    deadline = time.monotonic() + seconds
    for number, tool in enumerate(tools):
        share = (deadline - time.monotonic()) / (len(tools) - number)
        if share < 2:
            report.note(f"{tool}: no time left")
            continue
        _run(report, program, tool, share)


def _run(report, program, tool, seconds):
    command = [program, "--tool", tool, "--error-exitcode", str(ERROR_CODE)]
    command += ["--racecheck-report", "all"] if tool == "racecheck" else []
    command += [sys.executable, "-m", "benchmarks.gpu.stage", "small"]
    try:
        job = subprocess.run(
            command,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        report.note(f"{tool}: not finished within {seconds:.0f} s")
        return
    report.check(f"compute-sanitizer {tool}", job.returncode == 0, summary(job.stdout))


def summary(output: str) -> str:
    """Return the summary and the first finding of the sanitizer, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    messages = [x.removeprefix("=========").strip() for x in lines if x.startswith("=====")]
    result = next((line for line in messages if "SUMMARY" in line), None)
    heads = ("COMPUTE-SANITIZER", "ERROR SUMMARY")
    first = next((line for line in messages if line and not line.startswith(heads)), None)
    if result is None:
        return (messages or lines or ["no output"])[-1][:300]
    clean = result.endswith(("0 errors", "(0 errors, 0 warnings)"))
    return result if clean or first is None else f"{result}; {first}"[:300]
