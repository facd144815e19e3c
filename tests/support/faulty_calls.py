"""Make system calls fail or kill the process, with the shared library of faulty_calls.c."""

import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
KILL = -1  # used instead of an error number


def compiled(folder):
    """Compile the library into a folder, and return its path for LD_PRELOAD."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler, with which to build the library of faulty system calls")
    path = Path(folder) / "faulty_calls.so"
    words = [compiler, "-shared", "-fPIC", "-O1", "-o", path, SOURCE, "-ldl"]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return path


@functools.cache
def _functions():
    preloaded = ctypes.CDLL(os.environ["LD_PRELOAD"])
    preloaded.faulty_calls_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
    preloaded.faulty_calls_arm.restype = None
    preloaded.faulty_calls_count.restype = ctypes.c_long
    preloaded.faulty_calls_name.argtypes = [ctypes.c_long]
    preloaded.faulty_calls_name.restype = ctypes.c_char_p
    return preloaded


def calls(function, folder, number=0, error=0):
    """Call a function in this process, which preloads the library, and record its system calls.

    Returns
    -------
    names : list of str
        The system calls on the files of the folder. The call with number `number` fails. If the
        number is negative, all later calls fail as well.
    problem : Exception or None
        The exception that the function raised.
    """
    preloaded, problem = _functions(), None
    _keep.append(os.fsencode(folder))
    preloaded.faulty_calls_arm(_keep[-1], number, error)
    try:
        function()
    except Exception as raised:
        problem = raised
    count = preloaded.faulty_calls_count()
    preloaded.faulty_calls_arm(None, 0, 0)
    return [preloaded.faulty_calls_name(i + 1).decode() for i in range(count)], problem


_keep: list = []  # keeps the texts alive that the library refers to
