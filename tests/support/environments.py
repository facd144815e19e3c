"""Environments of Python that tests make."""

import subprocess
import sys
import sysconfig


def make_without_mpi(folder):
    """Make an environment with the packages of this one, but without its MPI; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"
