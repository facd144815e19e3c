"""Test that mpidl works on one rank without mpi4py, and that more ranks are an error."""

import os

import jobs
import pytest
from launcher import ROOT, mpirun

# A program that runs a command as if some packages were not installed.
BLOCKED = """
import runpy, sys

for name in sys.argv[1].split(","):
    sys.modules[name] = None
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "blocked.py"
    path.write_text(BLOCKED)
    return path


def train(script, missing, pictures, out, **keywords):
    words = ["--max-iterations", 2, "--batch-size", 50]
    words = jobs.command("train", *words, data=pictures, out=out)[1:]
    keywords["env"] = jobs.without_plots() | keywords.get("env", {})
    return mpirun(None, script, missing, *words, **keywords)


def test_training_gives_the_same_weights(script, pictures, tmp_path):
    out, words = tmp_path / "without", ("--max-iterations", 2)
    train(script, "mpi4py,rich,threadpoolctl", pictures, out, check=0)
    expected = jobs.trained_hash(1, pictures, tmp_path / "with", *words)
    assert jobs.weights_hash(out) == expected and jobs.summary(out)["ranks"] == 1
    assert "one rank without MPI" in (out / "options.toml").read_text()


def test_more_ranks_are_refused(script, pictures, tmp_path):
    environment = {"PMI_SIZE": 2, "PMI_RANK": 0}
    line = jobs.refusal(train(script, "mpi4py", pictures, tmp_path, env=environment))
    assert "the launcher started 2 tasks (PMI_SIZE=2)" in line and "mpi4py is not installed" in line


@pytest.mark.slow("jobs")
def test_the_error_of_mpi4py_is_printed(script, pictures, tmp_path):
    """If mpi4py cannot load an MPI library, the error contains the message of mpi4py."""
    broken = tmp_path / "mpi4py"
    broken.mkdir()
    (broken / "__init__.py").write_text("class rc:\n    pass\n")
    (broken / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PMI_SIZE": 2, "PMI_RANK": 0}
    result = train(script, "rich", pictures, tmp_path, env=environment, check=2)
    assert "mpi4py cannot be used: cannot load MPI library" in result.stderr


def test_a_command_starts_without_other_packages(script):
    result = mpirun(None, script, "PIL,h5py,rich,tomli_w,mpi4py", "mpidl.info", check=0)
    assert "one rank without MPI" in result.stdout
