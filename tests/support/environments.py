"""Create Python environments for tests."""

import subprocess
import sys
import sysconfig


def make_without_mpi(folder):
    """Create an environment with the current packages but without MPI, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"
