"""Test run/link_mpi.py, with which `run/install --system-mpi` links the machine's MPI."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import environments
import launcher
import pytest
from numpy.linalg import _umath_linalg

PROGRAM = launcher.ROOT / "run" / "link_mpi.py"
MPIRUNS = {"mpich": "/usr/bin/mpirun.mpich", "openmpi": "/usr/bin/mpirun.openmpi"}
PACKAGES = {"mpich": "mpich", "openmpi": "openmpi-bin"}
VERSION = """
from mpi4py import MPI
print(MPI.COMM_WORLD.allreduce(1), *MPI.Get_library_version().split()[:2])
"""


MAPS = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1]).MPI_Init
print(open("/proc/self/maps").read())
"""
SLOW = pytest.mark.slow("jobs")


@pytest.fixture
def environment(tmp_path):
    """Return the Python of an environment with this environment's packages, but without MPI."""
    return environments.make_without_mpi(tmp_path / "venv")


def run(python, *words, mpirun=None, **variables):
    """Run a command with the given `mpirun` first on PATH."""
    env = launcher.environment(variables)
    env["PATH"] = f"{python.parent}{os.pathsep}/usr/bin:/bin"
    if mpirun:
        folder = python.parents[2] / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "mpirun").write_text(f'#!/bin/sh\nexec {mpirun} "$@"\n')
        (folder / "mpirun").chmod(0o755)
        env["PATH"] = f"{folder}{os.pathsep}{env['PATH']}"
    return subprocess.run([*map(str, words)], capture_output=True, text=True, env=env, check=False)


def link(python, mpirun, **variables):
    return run(python, python, PROGRAM, mpirun=mpirun, **variables)


@pytest.mark.parametrize("abi", ["mpich", pytest.param("openmpi", marks=SLOW)])
def test_the_library_of_mpirun(environment, abi):
    """mpi4py uses the library of mpirun, even if another MPI library is installed.

    Without the link, mpi4py finds no library or the wrong library.
    """
    mpirun = MPIRUNS[abi]
    if not os.path.exists(mpirun):
        pytest.skip(f"no {mpirun}: apt-get install {PACKAGES[abi]}")
    result = link(environment, mpirun)
    assert (result.returncode, result.stdout) == (0, f"{abi}\n"), result.stderr
    words = ["mpirun", "-n", 2, environment, "-c", VERSION]
    result = run(environment, *words, mpirun=mpirun)
    name = {"mpich": "MPICH Version:", "openmpi": "Open MPI"}[abi]
    assert result.stdout == 2 * f"2 {name}\n", result.stderr
    links = list(Path(environment).parents[1].glob("lib/libmpi*"))
    for path in links:
        path.unlink()
    if links:  # negative control
        result = run(environment, *words, mpirun=mpirun)
        assert name not in result.stdout


@SLOW
def test_without_a_compiler(environment):
    """Debian's MPICH needs a C compiler, because mpi4py expects another library name."""
    if not os.path.exists(MPIRUNS["mpich"]):
        pytest.skip(f"no {MPIRUNS['mpich']}: apt-get install mpich")
    result = link(environment, MPIRUNS["mpich"], CC="/no/cc")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith(
        "expected a C compiler, to link it as libmpi.so.12: [Errno 2] No such file or directory: "
        "'/no/cc'"
    )


@SLOW
def test_a_library_by_name(environment, tmp_path):
    """MPI4PY_LIBMPI may name a library outside the folders of the dynamic loader."""
    libraries = Path(sys.prefix) / "lib"
    name = next(
        (name for name in ("libmpi.so.12", "libmpi.so.40") if (libraries / name).exists()), ""
    )
    if not name:
        pytest.skip("the MPI of this environment is not from pip")
    shutil.copytree(
        Path(sys.prefix) / "lib",
        tmp_path / "lib",
        symlinks=True,
        ignore=lambda folder, names: [n for n in names if n.startswith("python")],
    )
    result = link(
        environment, Path(sys.prefix) / "bin" / "mpirun", MPI4PY_LIBMPI=tmp_path / "lib" / name
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == "MPI4PY_LIBMPI: unset it, because the environment has a link now\n"
    result = run(environment, environment, "-c", MAPS, environment.parents[1] / "lib" / name)
    assert f" {tmp_path / 'lib' / name}\n" in result.stdout


@pytest.mark.parametrize(
    ("mpirun", "kind"),
    [
        ("false", ""),
        pytest.param("echo HYDRA #", " with the ABI mpich of mpirun", marks=SLOW),
    ],
)
def test_a_library_that_is_none(environment, mpirun, kind):
    library = _umath_linalg.__file__  # a library without MPI that every environment has
    result = link(environment, mpirun, MPI4PY_LIBMPI=library)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"expected an MPI library{kind}, found {library}: load the cluster's MPI (module load "
        "...), or name its library in MPI4PY_LIBMPI\n"
    )


@SLOW
def test_only_in_a_virtual_environment(environment):
    """Outside a virtual environment, the program does nothing, so shared folders do not change."""
    base = Path(os.path.realpath(environment))
    result = link(base, "false")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"expected the Python of a virtual environment, found {base}\n"
