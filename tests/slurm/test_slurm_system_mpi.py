"""Test run/train.slurm with the machine's MPI, which `run/install --system-mpi` sets up."""

import os
import subprocess

import environments
import launcher
import pytest

pytestmark = [pytest.mark.slow("slurm"), pytest.mark.timeout(240)]


def test_debians_mpich(submit, tmp_path, expected_hash):
    """This Slurm's default is no MPI, so the script must choose the type of --mpi by the ABI."""
    if not os.path.exists("/usr/bin/mpirun.mpich"):
        pytest.skip("no MPICH of Debian: apt-get install mpich")
    python = environments.make_without_mpi(tmp_path / "venv")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").symlink_to("/usr/bin/mpirun.mpich")
    env = launcher.environment() | {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    program = launcher.ROOT / "run" / "link_mpi.py"
    abi = subprocess.check_output([python, program], text=True, env=env)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "mpidl-checkout.pth").write_text(f"{launcher.ROOT}\n")
    (tmp_path / "venv" / "mpidl-mpi").write_text("system\n")
    (tmp_path / "venv" / "mpidl-abi").write_text(abi)
    training = submit()
    assert training.finish() == expected_hash
    assert (training.out / "options.toml").read_text().count("MPICH Version: 4") == 1
