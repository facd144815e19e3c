"""Compile CUDA C to cubins (GPU binaries) with NVRTC, NVIDIA's compiler library.

NVRTC needs no GPU or driver. NVRTC is part of CUDA toolkits, and is also available as a pip
package: nvidia-cuda-nvrtc for CUDA 13, nvidia-cuda-nvrtc-cu12 for CUDA 12. CUDA 13 compiles for
sm_75 and later, CUDA 12 also for sm_70. The module `cubins` caches the cubins.
"""

import contextlib
import ctypes
import functools
import glob
import hashlib
import importlib.util
import os
import re
from ctypes import byref

from mpidl.backends import discovery
from mpidl.backends.gpu import cubins
from mpidl.errors import UserError

# -fmad=false turns contraction off: kernels call fmaf explicitly. Denormals, quotients and square
# roots follow IEEE 754, because -ftz and -use_fast_math are absent. With -v, ptxas reports the
# registers of each kernel.
OPTIONS = ("-std=c++17", "-fmad=false", "--ptxas-options=-v")
WHEELS = ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12")
TOOLKITS = ("lib64", "lib", "targets/*/lib")


class Nvrtc:
    """An NVRTC library.

    `version` is a tuple such as (13, 0). `architectures` contains the GPU architectures that the
    library compiles for, as integers such as 75 for sm_75.
    """

    def __init__(self, path):
        self.path = path
        # Up to CUDA 13.0, NVRTC finds its builtins library only if that library is already loaded.
        for builtins in glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so*")):
            with contextlib.suppress(OSError):
                ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        self.version = major.value, minor.value
        self._call("nvrtcGetNumSupportedArchs", byref(count))
        supported = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", supported)
        self.architectures = tuple(supported)

    def _call(self, name, *arguments):
        error = getattr(self._library, name)(*arguments)
        if error:
            text = self._library.nvrtcGetErrorString(error).decode()
            raise RuntimeError(f"{self.path}: {name}: {text}")

    def compile(self, text, options, name):
        """Compile CUDA C and return (cubin, log); raise UserError with the compiler's errors."""
        program = ctypes.c_void_p()
        source, file = text.encode(), name.encode()
        self._call("nvrtcCreateProgram", byref(program), source, file, 0, None, None)
        try:
            words = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
            error = self._library.nvrtcCompileProgram(program, len(options), words)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if error:
                raise UserError(f"{name}: {self._error_message(error, log)}")
            return self._read(program, "CUBIN"), log
        finally:
            self._call("nvrtcDestroyProgram", byref(program))

    def _read(self, program, name):
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{name}Size", program, byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self._call(f"nvrtcGet{name}", program, buffer)
        return buffer.raw[: size.value]

    def _error_message(self, error, log, lines_shown=5):
        lines = [line.strip() for line in log.splitlines() if re.search(r"\b(error|fatal)\b", line)]
        lines = lines[:lines_shown] or log.split("\n")[:lines_shown]
        text = self._library.nvrtcGetErrorString(error).decode()
        return f"NVRTC {'.'.join(map(str, self.version))} says {text}: " + "; ".join(lines)


def cubin(unit, architecture):
    """Return the cubin (bytes) of a `kernels.Unit` for an architecture such as "sm_90".

    The cubin comes from the cache if possible. Raise UserError if no suitable NVRTC is installed,
    or if the unit does not compile.
    """
    return compiled(unit, architecture)[0]


def compiled(unit, architecture):
    """Return (cubin, log): the result of `cubin`, and the log of the compiler."""
    nvrtc = find(architecture)
    text, defines = unit.text, unit.defines
    parts = [repr(nvrtc.version), architecture, repr(OPTIONS), repr(tuple(defines)), text]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def make():
        return compile(text, architecture, defines, f"{unit.family}.cu")

    return cubins.cached(f"{unit.family}-{architecture}-{key}.cubin", make)


def compile(text, architecture, defines=(), name="kernels.cu"):
    """Compile CUDA C source without the cache; return (cubin, log).

    `defines` are the preprocessor definitions, pairs (name, value).
    """
    words = [f"-D{key}={value}" for key, value in defines]
    return find(architecture).compile(text, [*OPTIONS, f"-arch={architecture}", *words], name)


def find(architecture):
    """Return the newest Nvrtc that compiles for an architecture such as "sm_90".

    If a GPU driver is installed, the Nvrtc must produce cubins that the driver can run. Raise
    UserError if no Nvrtc meets these conditions.
    """
    return _find(int(re.sub(r"\D", "", architecture)), discovery.driver_version() // 1000)


@functools.cache
def _find(architecture, driver):
    candidates = installed()
    if not candidates:
        path = os.environ.get("MPIDL_NVRTC")
        raise UserError(
            f"MPIDL_NVRTC={path}: expected an NVRTC library that can be loaded"
            if path
            else (
                "found no NVRTC, which compiles the GPU kernels: pip install "
                f"{'nvidia-cuda-nvrtc-cu12' if driver == 12 else 'nvidia-cuda-nvrtc'}, or set "
                "CUDA_PATH to a CUDA toolkit, or MPIDL_NVRTC to a libnvrtc.so"
            )
        )
    able = [nvrtc for nvrtc in candidates if architecture in nvrtc.architectures]
    listing = ", ".join(
        f"{'.'.join(map(str, nvrtc.version))} ({nvrtc.path})" for nvrtc in candidates
    )
    if not able:
        raise UserError(f"no installed NVRTC supports sm_{architecture}; found {listing}")
    fit = [nvrtc for nvrtc in able if not driver or nvrtc.version[0] <= driver]
    if not fit:
        raise UserError(
            f"the driver supports CUDA {driver}, but NVRTC is newer: found {listing}; pip "
            "install nvidia-cuda-nvrtc-cu12"
        )
    return max(fit, key=lambda nvrtc: nvrtc.version)


@functools.cache
def installed():
    """Return one Nvrtc for each installed version.

    If MPIDL_NVRTC names a library, use only that library. Otherwise, search the pip packages, the
    toolkits in CUDA_PATH, CUDA_HOME and /usr/local/cuda, and the system's libraries.
    """
    by_version = {}
    for path in _paths():
        try:
            nvrtc = Nvrtc(path)
        except (OSError, AttributeError, RuntimeError):
            continue  # the library is for another system, or is not NVRTC
        by_version.setdefault(nvrtc.version, nvrtc)
    return tuple(by_version.values())


def _paths():
    path = os.environ.get("MPIDL_NVRTC")
    if path:
        return [path]
    spec = importlib.util.find_spec("nvidia")
    paths = [
        os.path.join(folder, library)
        for folder in (spec.submodule_search_locations if spec else None) or ()
        for library in WHEELS
    ]
    toolkits = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    for toolkit in filter(None, toolkits):
        for place in TOOLKITS:
            paths += sorted(glob.glob(os.path.join(toolkit, place, "libnvrtc.so*")), reverse=True)
    return [path for path in paths if os.path.exists(path)] + ["libnvrtc.so.13", "libnvrtc.so.12"]
