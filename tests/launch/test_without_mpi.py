"""A machine without mpi4py: the world is one rank, and a launcher of more is told so."""

import os

import pytest
import small
from launcher import ROOT, mpirun

# A command as if these packages were not installed.
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
    words = small.command("train", "--max-iterations", 3, data=pictures, out=out)
    assert words[0] == "-m"
    keywords["env"] = small.without_plots() | keywords.get("env", {})
    return mpirun(None, script, missing, *words[1:], **keywords)


def test_training_gives_the_same_weights(script, pictures, tmp_path):
    train(script, "mpi4py,rich,threadpoolctl", pictures, tmp_path / "without", check=0)
    train(script, "nothing", pictures, tmp_path / "with", check=0)
    found = [small.summary(tmp_path / name) for name in ("without", "with")]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert found[0]["iterations"] == 3 and found[0]["ranks"] == 1
    options = (tmp_path / "without" / "options.toml").read_text()
    assert "one rank without MPI" in options


def test_more_ranks_are_refused(script, pictures, tmp_path):
    environment = {"PMI_SIZE": 2, "PMI_RANK": 0}
    result = train(script, "mpi4py", pictures, tmp_path, env=environment, check=2)
    assert "the launcher started 2 tasks (PMI_SIZE=2)" in result.stderr
    assert "mpi4py is not installed" in result.stderr
    assert len(small.own_lines(result)) == 1


def test_what_mpi4py_says_is_passed_on(script, pictures, tmp_path):
    """mpi4py is there, and the MPI library that it loads is not."""
    broken = tmp_path / "mpi4py"
    broken.mkdir()
    (broken / "__init__.py").write_text("class rc:\n    pass\n")
    (broken / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PMI_SIZE": 2, "PMI_RANK": 0}
    result = train(script, "rich", pictures, tmp_path, env=environment, check=2)
    assert "mpi4py cannot be used: cannot load MPI library" in result.stderr


def test_other_packages_are_not_needed_to_begin(script):
    result = mpirun(None, script, "PIL,h5py,rich,tomli_w,mpi4py", "mpidl.info", check=0)
    assert "one rank without MPI" in result.stdout
