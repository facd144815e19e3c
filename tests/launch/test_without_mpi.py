"""Without mpi4py the world has one rank, and a launch of more ranks fails with an error."""

import os

import jobs
import pytest
from launcher import ROOT, mpirun

# A command without some packages, as if they were not installed.
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
    words = jobs.command("train", "--max-iterations", 3, data=pictures, out=out)
    assert words[0] == "-m"
    keywords["env"] = jobs.without_plots() | keywords.get("env", {})
    return mpirun(None, script, missing, *words[1:], **keywords)


def test_training_gives_the_same_weights(script, pictures, tmp_path):
    train(script, "mpi4py,rich,threadpoolctl", pictures, tmp_path / "without", check=0)
    train(script, "nothing", pictures, tmp_path / "with", check=0)
    assert jobs.weights_hash(tmp_path / "without") == jobs.weights_hash(tmp_path / "with")
    summary = jobs.summary(tmp_path / "without")
    assert summary["iterations"] == 3 and summary["ranks"] == 1
    options = (tmp_path / "without" / "options.toml").read_text()
    assert "one rank without MPI" in options


def test_more_ranks_are_refused(script, pictures, tmp_path):
    environment = {"PMI_SIZE": 2, "PMI_RANK": 0}
    line = jobs.refusal(train(script, "mpi4py", pictures, tmp_path, env=environment))
    assert "the launcher started 2 tasks (PMI_SIZE=2)" in line and "mpi4py is not installed" in line


def test_the_error_of_mpi4py_is_printed(script, pictures, tmp_path):
    """mpi4py is installed, but not the MPI library that it loads."""
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
