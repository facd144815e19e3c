"""Create Python environments and their module files for tests."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import mpidl

MODULE_FILES = Path(__file__).resolve().parents[2] / "packaging" / "modulefiles"
# (Debian package, the language of the module files, the file that defines `module` in bash)
MODULE_SYSTEMS = [
    ("lmod", "lua", Path("/usr/share/lmod/lmod/init/bash")),
    ("lmod", "tcl", Path("/usr/share/lmod/lmod/init/bash")),
    ("environment-modules", "tcl", Path("/usr/share/modules/init/bash")),
]


def make_without_mpi(folder):
    """Create an environment with the current packages but without MPI, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def copy_module_files(folder, checkout):
    """Copy the module files to a folder, and replace the path of the checkout in the files."""
    shutil.copytree(MODULE_FILES, folder)
    for path in folder.glob("*/mpidl/*"):
        text, root = path.read_text(), f"/apps/mpidl/{mpidl.__version__}"
        assert root in text and path.name.removesuffix(".lua") == mpidl.__version__
        path.write_text(text.replace(root, str(checkout)))


def use_modules(system, folder):
    """Return a bash script that defines `module` for module files in a folder, or skip the test."""
    package, language, init = system
    if not init.exists():
        pytest.skip(f"no {init}: apt-get install {package}")
    return f"source {init}\nmodule use {folder}/{language}\n"
