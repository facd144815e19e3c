"""Check mpidl's kernels with NVIDIA's compute-sanitizer: memory accesses, races, barriers."""

import glob
import importlib.util
import os
import shutil
import subprocess
import sys

from mpidl.launcher import environment

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


def check(report, program, tool, seconds, folder):
    """Run the program `small` of `stage` under a tool, within a time limit in seconds.

    Its output is in the file TOOL.txt of the folder, also if the time is up.
    """
    command = [program, "--tool", tool, "--error-exitcode", str(ERROR_CODE)]
    command += ["--racecheck-report", "all"] if tool == "racecheck" else []
    command += ["--print-limit", "20", sys.executable, "-u", "-m", "benchmarks.gpu.stage", "small"]
    path, code = os.path.join(folder, f"{tool}.txt"), None
    with open(path, "w") as output:
        try:
            code = subprocess.run(
                command,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=max(seconds - 2, 1),
            ).returncode
        except subprocess.TimeoutExpired:
            report.note(f"{tool}: not finished within {seconds:.0f} s")
    with open(path) as output:
        text = output.read()
    messages = findings(text)
    if code is not None:
        report.check(f"compute-sanitizer {tool}", code == 0, summary(text))
    elif messages:
        report.check(f"compute-sanitizer {tool}, so far", False, messages[0][:300])
    else:
        checks = text.count("  ok ")
        report.check(f"compute-sanitizer {tool}, so far", True, f"no finding; {checks} checks done")


def findings(output: str) -> list[str]:
    """Return the messages of the sanitizer in its output, without its heading and summary."""
    lines = [line.strip() for line in output.splitlines() if line.strip().startswith("=====")]
    messages = [line.removeprefix("=========").strip() for line in lines]
    heads = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY")
    return [text for text in messages if text and not text.startswith(heads)]


def summary(output: str) -> str:
    """Return the summary and the first finding of the sanitizer, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    result = next((line for line in lines if line.startswith("=====") and "SUMMARY" in line), None)
    if result is None:
        return (findings(output) or lines or ["no output"])[-1][:300]
    result = result.removeprefix("=========").strip()
    clean = result.endswith(("0 errors", "(0 errors, 0 warnings)"))
    return result if clean else "; ".join([result, *findings(output)[:1]])[:300]
