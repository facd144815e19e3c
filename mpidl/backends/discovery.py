"""Find the GPUs that this process may use, or the reason why there are none.

The module does not open a GPU.
"""

import contextlib
import ctypes
import functools
import os
from typing import NamedTuple

OLDEST = 70  # lowest compute capability that the kernels support, times 10
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


class Gpu(NamedTuple):
    """Properties of a GPU that this process may use."""

    index: int  # CUDA's index of this GPU among the visible GPUs
    identity: str  # identifier of the physical GPU or MIG instance, the same in all processes
    name: str  # such as "NVIDIA H200"
    architecture: str  # such as "sm_90"
    processors: int  # number of streaming multiprocessors
    memory: int  # size of the device memory in bytes


class Visible(NamedTuple):
    """The GPUs that this process may use, or the reason why there are none.

    `driver_count` is the number of GPUs that the driver shows this process.
    """

    gpus: tuple
    reason: str = ""
    driver_count: int = 0


class Versions(NamedTuple):
    """Versions of CuPy and CUDA as strings such as "13.2"."""

    cupy: str
    can_run: str  # the newest CUDA version that the driver can run
    made_for: str  # the CUDA version that CuPy is built for


def has_kernels():
    """Return whether this copy of mpidl can compute on GPUs: `backends.gpu` is a wing."""
    return os.path.isdir(os.path.join(os.path.dirname(__file__), "gpu"))


def visible():
    """Return the GPUs of this process as a Visible. Import CuPy only if the driver finds a GPU."""
    driver_count, reason = _ask_driver()
    if not driver_count:
        return Visible((), reason)
    if not has_kernels():
        return Visible((), "this copy of mpidl has no folder mpidl/backends/gpu/", driver_count)
    if not packages():
        extra = "cuda13" if driver_version() >= 13000 else "cuda12"
        return Visible((), f"CuPy is not installed: run/install --with {extra}", driver_count)
    try:
        from cupy.cuda import runtime

        gpus = tuple(_describe(runtime, i) for i in range(runtime.getDeviceCount()))
    except (ImportError, RuntimeError) as error:
        return Visible((), _reason_of(error), driver_count)
    able = tuple(gpu for gpu in gpus if int(gpu.architecture[3:]) >= OLDEST)
    if gpus and not able:
        oldest = f"{gpus[0].name} ({gpus[0].architecture})"
        return Visible((), f"{oldest} is older than sm_{OLDEST}", driver_count)
    return Visible(able, "" if able else "CuPy finds no GPU", driver_count)


def versions():
    """Return the Versions of CuPy and CUDA, or None if CuPy is missing or cannot be imported."""
    if not packages():
        return None
    try:
        import cupy
        from cupy.cuda import runtime

        numbers = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    except (ImportError, RuntimeError):
        return None
    return Versions(cupy.__version__, *map(in_words, numbers))


def _ask_driver():
    """Return the number of GPUs that the driver shows this process, and the reason if it is 0."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, "no NVIDIA driver"
    count = ctypes.c_int()
    error = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if error and error != NO_DEVICE:
        name = ctypes.c_char_p()
        library.cuGetErrorName(error, ctypes.byref(name))
        return (
            0,
            f"the NVIDIA driver cannot be initialized: {(name.value or b'').decode() or error}",
        )
    if not count.value and "CUDA_VISIBLE_DEVICES" in os.environ:
        return 0, f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides every GPU"
    return count.value, "" if count.value else "the NVIDIA driver finds no GPU"


def driver_version():
    """Return the newest CUDA version that the driver runs, 13020 for 13.2; 0 without a driver."""
    with contextlib.suppress(OSError):
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        return version.value
    return 0


@functools.cache
def packages():
    """Return the installed packages that provide CuPy, such as ["cupy-cuda13x 14.2.0"]."""
    from importlib import metadata  # the import takes 22 ms, and few ranks need it

    installed = ((d.metadata["Name"] or "", d.version) for d in metadata.distributions())
    return sorted(f"{name} {v}" for name, v in installed if name.lower().startswith("cupy"))


def _reason_of(error):
    """Return the reason why CuPy cannot use the GPU, as text for an error message."""
    package = ", ".join(packages())
    if isinstance(error, ImportError):
        return f"{package} cannot be loaded: {' '.join(str(error).split())[:200]}"
    cuda_versions, newest = versions(), driver_version()
    if cuda_versions is not None and newest // 1000 < int(cuda_versions.made_for.partition(".")[0]):
        return (
            f"the NVIDIA driver supports CUDA up to {in_words(newest)}, but {package} is built "
            f"for {cuda_versions.made_for}: install CuPy for CUDA {newest // 1000} or a newer "
            "driver"
        )
    return f"{package}: {error}"


def in_words(number):
    """Convert a CUDA version number, such as 13020, to a string, such as "13.2"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _describe(runtime, index):
    facts = runtime.getDeviceProperties(index)
    # CuPy truncates the UUID at its first zero byte, so the identity contains the PCI bus ID too
    identity = f"{runtime.deviceGetPCIBusId(index)} {bytes(facts.get('uuid', b'')).hex()}"
    return Gpu(
        index,
        identity.strip().lower(),
        facts["name"].decode(errors="replace"),
        f"sm_{facts['major']}{facts['minor']}",
        facts["multiProcessorCount"],
        facts["totalGlobalMem"],
    )
