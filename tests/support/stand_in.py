"""Start processes whose GPU is the stand-in for CuPy and NVIDIA's libraries in `cupy_on_host`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from emulator import compiler

TESTS = Path(__file__).resolve().parents[1]
FOLDER = TESTS / "support" / "cupy_on_host"


def environment(folder):
    """Return environment variables of processes that find the stand-in.

    `folder` receives the libraries and the cache of cubins.
    """
    if compiler.find() is None:
        pytest.skip("no g++, which the emulated GPU compiles kernels with")
    library = Path(folder) / "libcuda.so.1"
    if not library.exists():
        command = [compiler.find(), "-x", "c++", "-fpermissive", "-w", "-shared", "-fPIC"]
        source = (FOLDER / "libraries.c").read_text()
        wrapped = f'extern "C" {{\n{source}\n}}\n'.replace("#include", "\n#include")
        subprocess.run([*command, "-", "-o", str(library)], input=wrapped, text=True, check=True)
    paths = [str(FOLDER), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    libraries = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    variables = {key: value for key, value in os.environ.items() if key != "MPIDL_DEVICE"}
    return variables | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PATH": f"{FOLDER / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "MPIDL_NVRTC": str(library),
        "MPIDL_CACHE": str(folder),
        "MPIDL_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }


def run(folder, *command, **options):
    """Run a command with the stand-in and return the CompletedProcess, with its output as text."""
    options = {"capture_output": True, "text": True, "env": environment(folder)} | options
    words = [shutil.which(str(command[0])) or str(command[0]), *map(str, command[1:])]
    return subprocess.run(words, **options)
