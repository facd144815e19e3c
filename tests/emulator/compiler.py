"""Compiles CUDA C for the CPU: shim.h, a unit's text, and a C function to call each kernel by."""

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from mpidl.backends.gpu import kernels

SHIM = (Path(__file__).parent / "shim.h").read_text()
# No contraction: a product and a sum are rounded each, as by NVRTC's -fmad=false. Kernels look at
# floats as integers and shared memory as any type, as CUDA lets them.
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
FLAGS += ["-fcf-protection=none"] if os.uname().machine == "x86_64" else []
FLAGS += ["-march=native", "-fPIC", "-shared", "-w"]
C_TYPES = {np.dtype(short): name for name, short in kernels.ELEMENTS.items()}
C_NUMBERS = {ctype: name for name, ctype in kernels.NUMBERS.items()}


def find():
    """Path of g++, or None: MPIDL_CXX, else g++ or c++."""
    names = filter(None, [os.environ.get("MPIDL_CXX"), "g++", "c++"])
    return next(filter(None, map(shutil.which, names)), None)


def program(text, defines=()):
    """The whole C++ text of a unit."""
    names = "".join(f"#define {name} {value}\n" for name, value in defines)
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    calls = [_call(name, found, code) for name, found in kernels.signatures(text).items()]
    return f'{SHIM}{names}{text}\n#line 1 "calls"\n' + "".join(calls)


def _call(name, arguments, text):
    """C functions that unpack a kernel's arguments and run it; the most threads it is made for."""
    values = []
    for i, argument in enumerate(arguments):
        if argument.element is None:
            values.append(f"*({C_NUMBERS[argument.ctype]}*)a[{i}]")
        else:
            values.append(f"*({C_TYPES[argument.element]}**)a[{i}]")
    bounds = re.search(rf"__launch_bounds__\(([^)]*)\)\s+{name}\(", text)
    return f"""
static void emulated_{name}(void** a) {{ {name}({", ".join(values)}); }}
extern "C" int threads_{name}() {{ return shim::first({bounds[1] if bounds else 1024}); }}
extern "C" const char* run_{name}(
    void** values, const unsigned* grid, const unsigned* block, size_t shared, int schedule,
    int truncating, const shim::Guard* guards, long long n_guards, long long* culprit) {{
    return shim::launch(emulated_{name}, values, grid, block, shared, schedule, truncating,
                        guards, n_guards, culprit);
}}
"""


@functools.cache
def loaded(text, family, defines=()):
    """A unit's kernels, a ctypes.CDLL. Compiled once for all processes of this user."""
    return ctypes.CDLL(compiled(program(text, defines), family))


def compiled(text, name):
    """Path of the shared object made of a C++ text; kept under its hash in a temporary folder."""
    key = hashlib.sha256("\0".join([*_compiler(), *FLAGS, text]).encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"mpidl-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{name}-{key}.so"
    if path.exists():
        return path
    with open(folder / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel of the system lets go of a dead one's
        if not path.exists():
            source = path.with_suffix(".cpp")
            source.write_text(text)
            made = path.with_suffix(f".{os.getpid()}")
            command = [_compiler()[0], *FLAGS, str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line]
                raise RuntimeError(f"{name}.cu: g++ says: " + "\n".join(lines or [done.stderr]))
            os.replace(made, path)
            source.unlink()
    (folder / f"{key}.lock").unlink(missing_ok=True)
    return path


@functools.cache
def _compiler():
    """(path, version, processor): what compiles, and for what."""
    path = find()
    if path is None:
        raise RuntimeError("the emulator needs g++ (or MPIDL_CXX)")
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    flags = ""
    if os.path.exists("/proc/cpuinfo"):
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        flags = found[1] if found else ""
    return path, version, flags
