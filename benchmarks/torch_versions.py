"""Find the versions of PyTorch to compare with, each in a separate Python environment.

A process can import only one version. Versions other than the installed version are therefore in
virtual environments: the user's environments, or environments that `find` creates in
build/torch-VERSION. Created environments take all other packages from this environment.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import torch_step, turns
from mpidl.errors import UserError
from mpidl.training.options import configuration

FOLDER = Path(__file__).resolve().parents[1] / "build"
COMPLETE = "complete"  # name of a file that marks a complete environment


class TorchPython(NamedTuple):
    """Version of PyTorch, and the Python interpreter that imports it."""

    version: str
    python: str


def find(words: Sequence[str], folder: Path = FOLDER) -> list[TorchPython]:
    """Return the versions that `--torch` names.

    Parameters
    ----------
    words : sequence of str
        Versions such as "2.13.0", and paths of Python interpreters. If empty, the result is the
        installed version, if there is one.
    folder : Path
        Folder for the environments of versions that are not installed.

    Raises
    ------
    UserError
        If a version cannot be installed, if an interpreter cannot import PyTorch, or if a version
        occurs twice.
    """
    versions = [_find_one(word, folder) for word in words]
    if not words and torch_step.is_installed():
        versions = [TorchPython(_installed_version(), sys.executable)]
    numbers = [version for version, _ in versions]
    repeated = next((number for number in numbers if numbers.count(number) > 1), None)
    if repeated is not None:
        raise UserError(f"--torch: expected different versions, found {repeated} twice")
    return versions


def _find_one(word, folder):
    if os.sep in word:
        return TorchPython(_version_in(word, word), word)
    installed = _installed_version() if torch_step.is_installed() else ""
    if word in (installed, _public(installed)):
        return TorchPython(_public(installed), sys.executable)
    python = str(_environment(word, folder))
    return TorchPython(_version_in(python, word), python)


def _installed_version():
    return str(configuration.version_of("torch"))


def _public(version):
    """Return a version without the build name: "2.13.0+cpu" gives "2.13.0"."""
    return version.partition("+")[0]


def _version_in(python, word):
    """Return the version of PyTorch that a Python imports."""
    command = [python, "-c", "import torch; print(torch.__version__)"]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"--torch {word}: expected a Python program: {error.strerror}") from None
    if result.returncode:
        message = turns.last_message(result.stderr)
        raise UserError(f"--torch {word}: this Python cannot import PyTorch: {message}")
    return _public(result.stdout.split()[-1])


def _environment(version, folder):
    """Return the Python of the environment with a version; create a missing environment."""
    place = folder / f"torch-{version}"
    python = place / "bin" / "python"
    if (place / COMPLETE).exists():
        return python
    print(f"installing PyTorch {version} in {place} (once)", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    commands = [
        [sys.executable, "-m", "venv", str(place)],
        [str(python), "-m", "pip", "install", "--quiet", f"torch=={version}"],
    ]
    for command in commands:
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            lines = (result.stderr or result.stdout).splitlines()
            errors = [line for line in lines if line.startswith("ERROR: ")] or lines[-1:]
            raise UserError(f"--torch {version}: cannot install it: {' '.join(errors[-1:])}")
    (packages,) = place.glob("lib/python*/site-packages")
    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "mpidl-benchmarks.pth").write_text("\n".join(folders) + "\n")
    (place / COMPLETE).touch()
    return python
