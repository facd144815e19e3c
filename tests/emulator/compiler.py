"""Compile CUDA C for the CPU: shim.h, a unit's text, and a C function that calls each kernel.

Compiled units stay in a temporary folder that all processes and checkouts of the user share.
"""

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

from mpidl.backends import declarations

SHIM = "".join((Path(__file__).parent / name).read_text() for name in ("shim.h", "checks.h"))
# Without contraction, products and sums are rounded separately, as with NVRTC's -fmad=false.
# Without strict aliasing, kernels may read floats as integers, and shared memory as any type, as in
# CUDA. -Og takes less than half of the compile time of -O2, and the tests run about as fast.
FLAGS = ["-std=c++17", "-Og", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
FLAGS += ["-fcf-protection=none"] if os.uname().machine == "x86_64" else []
FLAGS += ["-march=native", "-fPIC", "-w"]
# A misaligned access, or an overflow of a signed integer, calls a function of checks.h. In clang++,
# the copy of a misaligned structure calls none.
CHECKS = ["-fsanitize=alignment,signed-integer-overflow"]


def find():
    """Return the path of the first of MPIDL_CXX, g++ and c++ that exists, or None."""
    names = filter(None, [os.environ.get("MPIDL_CXX"), "g++", "c++"])
    return next(filter(None, map(shutil.which, names)), None)


def program(text, defines=()):
    """Return the C++ text of a unit, which follows shim.h."""
    # the emulator ignores MIN_BLOCKS, so that units which differ only in it share a library
    values = {**dict(defines), **({"MIN_BLOCKS": 1} if "MIN_BLOCKS" in dict(defines) else {})}
    names = "".join(f"#define {name} {value}\n" for name, value in values.items())
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    calls = [_call(name, kernel, code) for name, kernel in declarations.kernels(text).items()]
    return f'{names}{text}\n#line 1 "calls"\n' + "".join(calls)


def _call(name, kernel, text):
    """Return C functions that run a kernel and return its maximum number of threads."""
    types = [f"{value.type}{'*' if value.is_pointer else ''}" for value in kernel.parameters]
    values = [f"*({type_}*)a[{i}]" for i, type_ in enumerate(types)]
    bounds = re.search(rf"__launch_bounds__\(([^)]*)\)\s+{name}\(", text)
    return f"""
static void emulated_{name}(void** a) {{ {name}({", ".join(values)}); }}
extern "C" int threads_{name}() {{ return shim::first({bounds[1] if bounds else 1024}); }}
extern "C" const char* run_{name}(
    void** values, const unsigned* grid, const unsigned* block, size_t shared, int schedule,
    int truncating, const shim::Guard* guards, long long n_guards, long long* culprit,
    shim::Stacks* stacks) {{
    return shim::launch(emulated_{name}, values, grid, block, shared, schedule, truncating,
                        guards, n_guards, culprit, stacks);
}}
"""


@functools.cache
def loaded(text, family, defines=()):
    """Return the library of a unit's kernels."""
    return ctypes.CDLL(compiled(program(text, defines), family))


def compiled(text, name):
    """Return the path of the shared object compiled from shim.h and a C++ text."""

    def compile_unit(target):
        source = target.with_suffix(".cpp")
        unlinked = target.with_suffix(".o")
        source.write_text(text)
        _run(f"{name}.cu", *CHECKS, "-c", "-include", _header(), source, "-o", unlinked)
        _run(f"{name}.cu", "-shared", unlinked, "-o", target)  # without the sanitizers' library
        source.unlink()
        unlinked.unlink()

    return _make_once(f"{name}-{_key(text)}.so", compile_unit)


@functools.cache
def _header():
    """Return the path of a copy of shim.h, with a precompiled header next to it.

    Otherwise, small units would spend most of their compile time on the C++ headers.
    """
    path = _folder() / f"shim-{_key('')}.h"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(SHIM)
        os.replace(part, path)
    words = *CHECKS, "-x", "c++-header", path, "-o"
    _make_once(f"{path.name}.gch", lambda out: _run("shim.h", *words, out))
    return path


def _run(name, *words):
    command = [_compiler()[0], *FLAGS, *map(str, words)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if "error" in line]
        raise RuntimeError(f"{name}: g++ says: " + "\n".join(lines or [process.stderr]))


def _folder():
    folder = Path(tempfile.gettempdir()) / f"mpidl-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _key(text):
    parts = *_compiler(), *FLAGS, *CHECKS, SHIM, text
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _make_once(name, make):
    """Return the path of a file, which one process creates with make(path) while others wait."""
    path = _folder() / name
    if path.exists():
        return path
    lock_path = path.with_name(f"{name}.lock")
    with open(lock_path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases locks of dead processes
        if not path.exists():
            part = path.with_name(f"{name}.{os.getpid()}")
            make(part)
            os.replace(part, path)
    lock_path.unlink(missing_ok=True)
    return path


@functools.cache
def _compiler():
    """Return (path, version, processor flags) of the compiler and its target."""
    path = find()
    if path is None:
        raise RuntimeError("the emulator needs g++ (or MPIDL_CXX)")
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    flags, cpuinfo = "", Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.M)
        flags = match[1] if match else ""
    return path, version, flags
