"""Ranks whose CPUs differ, as MPIDL_CPU makes them: they all run what the least of them can."""

import os

import pytest
import small
from launcher import mpirun

from mpidl.backends.cpu import builds

SHORT = ["--max-iterations", 2, "--batch-size", 50, "--threads", 1]
# What `python -m mpidl.train` does, on a rank that was told of another CPU.
PROGRAM = """
import os, sys
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK"))
os.environ["MPIDL_CPU"] = os.environ["BUILDS"].split()[rank]
from mpidl.cli.train import main
from mpidl.comm import failure
failure.run(lambda: main(sys.argv[1:]))
"""
MORE = pytest.mark.slow("ranks")
BUILDS = [build for build in builds.built() if builds.runs_here(build)]
needs_two = pytest.mark.skipif(
    len(BUILDS) < 2, reason=f"a mix needs two builds, here run: {', '.join(BUILDS) or 'none'}"
)


def train(data, out, builds, check=0):
    """Train on a rank for each of the builds."""
    words = small.command("train", *SHORT, data=data, out=out)[2:]
    env = small.without_plots() | {"BUILDS": " ".join(builds)}
    return mpirun(len(builds), "-c", PROGRAM, *words, env=env, check=check)


def alone(data, out, build):
    words = small.command("train", *SHORT, data=data, out=out)
    return mpirun(1, *words, env=small.without_plots() | {"MPIDL_CPU": build}, check=0)


@needs_two
@pytest.mark.parametrize(
    "lower", [*BUILDS[1:2], *(pytest.param(b, marks=MORE) for b in [*BUILDS[2:], "numpy"])]
)
def test_the_lowest_of_a_mix_is_what_all_run(pictures, tmp_path, lower):
    builds = [BUILDS[0], lower, BUILDS[0]]
    result = train(pictures, tmp_path / "mix", builds)
    host = os.uname().nodename
    lines = [line for line in result.stdout.splitlines() if "warning" in line and "kernels" in line]
    mix = f"{BUILDS[0]} on {host}; {lower} on {host}"
    assert lines == [f"warning: the ranks have different kernels, and all run {lower}: {mix}"]
    alone(pictures, tmp_path / "alone", lower)
    found = [small.summary(tmp_path / name)["weights_sha256"] for name in ("mix", "alone")]
    assert found[0] == found[1]


def test_a_rank_that_cannot_is_named_once(pictures, tmp_path):
    result = train(pictures, tmp_path / "out", ["numpy", "x86-64-v9"], check=2)
    assert small.own_lines(result) == [
        "mpidl: MPIDL_CPU: expected one of x86-64-v4, x86-64-v3, generic, numpy, found 'x86-64-v9'"
    ]
