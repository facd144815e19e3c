"""Test that ranks with different CPUs run the best kernel build that all of these CPUs support.

The variable MPIDL_CPU simulates the CPUs.
"""

import os

import jobs
import pytest
from launcher import mpirun

from mpidl.backends.cpu import builds

SHORT = ["--max-iterations", 2, "--batch-size", 50, "--threads", 1]
# `python -m mpidl.train` with a different CPU on each rank.
PROGRAM = """
import os, sys
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK"))
os.environ["MPIDL_CPU"] = os.environ["BUILDS"].split()[rank]
from mpidl.cli.train import main
from mpidl.ranks import failure
failure.run(lambda: main(sys.argv[1:]))
"""
SLOW = pytest.mark.slow("ranks")
BUILDS = [build for build in builds.built() if builds.runs_here(build)]
needs_two = pytest.mark.skipif(
    len(BUILDS) < 2, reason=f"a mix needs two builds, here run: {', '.join(BUILDS) or 'none'}"
)


def train(data, out, builds, check=0):
    """Train on one rank per build in `builds`."""
    words = jobs.command("train", *SHORT, data=data, out=out)[2:]
    env = jobs.without_plots() | {"BUILDS": " ".join(builds)}
    return mpirun(len(builds), "-c", PROGRAM, *words, env=env, check=check)


@needs_two
@pytest.mark.parametrize(
    "lower", [*BUILDS[1:2], *(pytest.param(b, marks=SLOW) for b in [*BUILDS[2:], "numpy"])]
)
def test_all_ranks_run_the_lowest_build(pictures, tmp_path, lower):
    builds = [BUILDS[0], lower]
    result = train(pictures, tmp_path / "mix", builds)
    host = os.uname().nodename
    lines = [line for line in result.stdout.splitlines() if "warning" in line and "kernels" in line]
    mix = f"{BUILDS[0]} on {host}; {lower} on {host}"
    text = f"warning: the ranks have different kernels, so all use {lower}: {mix}; request nodes of"
    assert len(lines) == 1 and lines[0].startswith(text)
    env = {"MPIDL_CPU": lower}
    expected = jobs.trained_hash(1, pictures, tmp_path / "single", *SHORT, env=env)
    assert jobs.weights_hash(tmp_path / "mix") == expected


@pytest.mark.slow("jobs")
def test_an_unknown_build_is_reported_once(pictures, tmp_path):
    names = "x86-64-v4-bf16, x86-64-v4, x86-64-v3, generic, numpy"
    text = f"MPIDL_CPU: expected one of {names}, found 'x86-64-v9'"
    result = train(pictures, tmp_path / "out", ["numpy", "x86-64-v9"], check=2)
    assert jobs.refusal(result) == text
