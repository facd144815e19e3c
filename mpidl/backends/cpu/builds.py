"""Select, load and call a build of the compiled CPU kernels.

A build is a library compiled from kernels/cpu for one instruction set. A process runs the best
build that its CPU supports, or the build named by the environment variable MPIDL_CPU. The ranks of
a World run the best build that all ranks support (see `settle`). If no library can be used, the
build is called "numpy", and NumPy computes everything.
"""

import contextlib
import ctypes
import functools
import os
import runpy
import threading

import numpy as np

from mpidl.backends import declarations, settings
from mpidl.core.blocks import LANES
from mpidl.core.values import BF16
from mpidl.errors import UserError

# The Linux names of the CPU features that each build needs. The best build comes first.
AVX2 = frozenset("avx2 fma bmi1 bmi2".split())
AVX512 = AVX2 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
NEEDS = {
    "x86-64-v4-bf16": AVX512 | {"avx512_bf16"},
    "x86-64-v4": AVX512,
    "x86-64-v3": AVX2,
    "generic": frozenset(),
    "numpy": frozenset(),
}
ORDER = list(NEEDS)

# Functions that use neither the threads nor the scratch memory of the library. Threads that prepare
# mini-batches may call these functions at any time. The progress hook (see `watch`) may call the
# functions of sums.c at any time. All other functions run one at a time.
ANY_THREAD = {
    *("images", "images_of_floats", "warp", "warp_of_floats", "planes", "planes_of_arrow"),
    "keyed_words",
    *("sums_start", "sums_advance", "sums_wait", "sums_leave"),
}


class Process:
    """What this process runs: a build, its Library, and at most one kernel at a time."""

    def __init__(self):
        self.build = self.kernels = None  # None before `use`; the Library of "numpy" is None, too
        self.hook = self.raised = None  # the C callback of `watch`, and the error that it raised
        self.set_lock()

    def set_lock(self):
        """Create the lock, also in a forked child: a thread of the parent may have held it."""
        self.lock, self.thread = threading.Lock(), None  # held during a call, and by whom


process = Process()
os.register_at_fork(after_in_child=process.set_lock)

BYTES = ctypes.c_char * 0
TYPES = {
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "void": None,
}


@functools.cache
def _pointer(name, const):
    """Return a ctypes type that accepts C-contiguous arrays of a C type, or None for NULL."""
    dtypes = {"float": np.dtype("f4"), "double": np.dtype("f8"), "uint16_t": BF16}
    dtype = dtypes.get(name) or np.dtype(name.removesuffix("_t"))

    def from_param(array):
        if array is None:
            return None
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise TypeError(
                f"expected a C-ordered array of {dtype}, got {array.dtype} of shape {array.shape} "
                f"with strides {array.strides}"
            )
        if array.flags.writeable:
            return BYTES.from_buffer(array)  # five times as fast as array.ctypes
        if not const:
            raise TypeError(
                f"expected a writable array, got a read-only one of shape {array.shape}"
            )
        return ctypes.c_void_p(array.ctypes.data)

    return type(f"{name}*", (), {"from_param": staticmethod(from_param), "const": const})


def _type(value):
    if not value.type:
        return ctypes.c_void_p  # a function pointer
    if value.type == "char":
        return ctypes.c_char_p
    return _pointer(value.type, value.is_const) if value.is_pointer else TYPES[value.type]


def ctypes_of(functions):
    """Return {name: (result type, argument types)} for ctypes of `declarations.exported`."""
    return {
        name: (_type(function.result), [_type(parameter) for parameter in function.parameters])
        for name, function in functions.items()
    }


_sinks = threading.local()  # has the attribute `recorder` in a thread that records a step


def recorder():
    """Return the `Recorder` of the step that this thread records, or None."""
    return getattr(_sinks, "recorder", None)


@contextlib.contextmanager
def through(recorder):
    """Pass this thread's kernel calls to a recorder within the `with` block; nothing is computed.

    Functions of `ANY_THREAD` still run.
    """
    before, _sinks.recorder = getattr(_sinks, "recorder", None), recorder
    try:
        yield
    finally:
        _sinks.recorder = before


def _one_at_a_time(name, function, missing_bytes):
    """Return a function that calls a kernel while no other kernel runs.

    The function raises MemoryError if the kernel cannot allocate its scratch memory.
    """
    is_recorded = ctypes.c_void_p not in function.argtypes  # False for a function that sets a hook

    def call(*arguments):
        me = threading.get_ident()
        if is_recorded and (sink := recorder()) is not None:
            return sink.launch(name, arguments)
        if process.thread == me:
            raise RuntimeError("a kernel was called from the progress hook of another kernel")
        with process.lock:
            process.thread = me
            try:
                result = function(*arguments)
            finally:
                process.thread = None
            if missing_bytes.value:
                nbytes, missing_bytes.value = missing_bytes.value, 0
                raise MemoryError(f"cannot allocate {nbytes >> 20} MiB of scratch for a kernel")
            return result

    return call


class Library:
    """A loaded build. Its functions are attributes, named without the prefix `mpidl_`.

    Raises
    ------
    UserError
        If the file cannot be loaded, or if the caller accesses a function whose declaration in the
        library differs from the header. Such a library was compiled from other sources.
    """

    def __init__(self, path, header, build):
        self.path, self.build = path, build
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be loaded: {error}") from error
        with open(header) as file:
            self._functions = declarations.exported(file.read())
        self._declared = ctypes_of(self._functions)
        try:
            self._missing_bytes = ctypes.c_int64.in_dll(self._library, "mpidl_missing_bytes")
        except ValueError:  # compiled from older sources
            self._missing_bytes = None
        try:
            declared = self._library.mpidl_declarations
        except AttributeError:
            self._has = {}
        else:
            declared.restype = ctypes.c_char_p
            self._has = declarations.exported(declared().decode())
        self._positions = {name: i for i, name in enumerate(self._has)}

    @property
    def provenance(self):
        """The build's name, its compiler, and the hash of its sources, as a dict."""
        sources = self.sources().decode().removeprefix("mpidl sources ")
        return {"build": self.build, "compiler": self.compiler().decode(), "sources": sources}

    def argument_types(self, name):
        """Return the ctypes types of a function's arguments.

        Pointer types have the attribute `const`, which is True if the function only reads the
        array.
        """
        return self._declared[name][1]

    def position(self, name):
        """Return a function's position in the header, which identifies the function in `play`."""
        return self._positions[name]

    def __getattr__(self, name):
        if name.startswith("_") or name not in self._declared:
            raise AttributeError(f"kernels/cpu/mpidl.h declares no mpidl_{name}")
        function = getattr(self._library, f"mpidl_{name}", None)
        has_flag = self._missing_bytes is not None
        if function is None or not has_flag or self._has.get(name) != self._functions[name]:
            raise UserError(
                f"{self.path}: compiled from sources of another version (mpidl_{name} differs): "
                f"{how_to_build()}"
            )
        function.restype, function.argtypes = self._declared[name]
        if name not in ANY_THREAD:
            function = _one_at_a_time(name, function, self._missing_bytes)
        if f"{name}_bf16" in self._declared:
            function = self._by_storage(name, function)
        setattr(self, name, function)
        return function

    def _by_storage(self, name, function):
        """Return a function that calls the kernel for float32 or the one for bfloat16 arrays."""
        for_bf16, types = getattr(self, f"{name}_bf16"), self._declared[f"{name}_bf16"][1]
        pairs = enumerate(zip(self._declared[name][1], types, strict=True))
        values = [i for i, (float_type, bf16_type) in pairs if float_type is not bf16_type]

        def call(*arguments):
            value = next(arguments[i] for i in values if arguments[i] is not None)
            return (for_bf16 if value.dtype == BF16 else function)(*arguments)

        return call


def why_numpy():
    """Return a one-line reason why no library can be used.

    Return None if a library can be used or MPIDL_CPU is "numpy". Raise UserError if MPIDL_CPU names
    an unusable build.
    """
    if os.environ.get("MPIDL_CPU") == "numpy" or choose() != ["numpy"]:
        return None
    for build in offered():
        if build != "numpy":
            try:
                load(build)
            except UserError as error:
                return str(error)
    return f"none are compiled: {how_to_build()}"


def watch(progress):
    """Make kernels call progress() about every millisecond on this thread. None stops the calls.

    The calls let MPI messages progress while a kernel runs. If progress() raises an exception, the
    next call of `watch` raises this exception.
    """
    if running() == "numpy":
        return
    raised, process.raised = process.raised, None

    def call():
        try:
            if process.raised is None:
                progress()
        except BaseException as error:  # exceptions cannot pass through C
            process.raised = error

    hook = None if progress is None else ctypes.CFUNCTYPE(None)(call)
    kernels().set_hook(hook)
    process.hook = hook  # keep it alive, and release the old one
    if raised is not None:
        raise raised


def is_stale():
    """Return whether the library was compiled from sources that differ from the checkout."""
    build_py = os.path.join(kernels_folder() or "", "build.py")
    library = kernels()
    if library is None or not os.path.isfile(build_py):
        return False
    return library.provenance["sources"] != runpy.run_path(build_py)["sources_key"]()


def how_to_build():
    """Return a short hint on how to compile missing or outdated libraries."""
    folder = kernels_folder()
    if folder and os.path.isfile(os.path.join(folder, "build.py")):
        return f"run python {os.path.join(folder, 'build.py')}, which needs a C compiler"
    return "reinstall mpidl on a machine with a C compiler"


@functools.cache
def kernels_folder():
    """Return the path of kernels/ in this checkout or installation, or None if it is missing."""
    package = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    for folder in (
        os.path.join(os.path.dirname(package), "kernels"),
        os.path.join(package, "kernels"),
    ):
        if os.path.isfile(os.path.join(folder, "cpu", "mpidl.h")):
            return folder
    return None


def path_of(build):
    """Return the path of a build's library in the folder $MPIDL_KERNELS, or else kernels/lib."""
    lib = os.environ.get("MPIDL_KERNELS") or os.path.join(kernels_folder() or "", "lib")
    return os.path.join(lib, f"libmpidl-{build}.so")


def built():
    """Return the builds whose libraries exist, best first."""
    has_folder = kernels_folder() is not None
    return [b for b in ORDER if b != "numpy" and has_folder and os.path.isfile(path_of(b))]


@functools.cache
def cpu_features():
    """Return the Linux names of the CPU features that the system enables."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def runs_here(build):
    """Return whether this CPU can run a build."""
    return NEEDS[build] <= cpu_features()


def has_native_bf16(build):
    """Return whether a build uses the CPU's products of bf16 numbers instead of widening them."""
    return "avx512_bf16" in NEEDS[build]


def offered():
    """Return the builds that exist and run on this CPU, best first. The last build is "numpy".

    If MPIDL_CPU is set, the list starts with the build that it names.

    Raises
    ------
    UserError
        If MPIDL_CPU is not the name of a build, or if the build does not exist or cannot run on
        this CPU.
    """
    requested = os.environ.get("MPIDL_CPU")
    names = [*(build for build in built() if runs_here(build)), "numpy"]
    if not requested:
        return names
    if requested not in ORDER:
        raise UserError(f"MPIDL_CPU: expected one of {', '.join(ORDER)}, found {requested!r}")
    if not runs_here(requested):
        missing = " ".join(sorted(NEEDS[requested] - cpu_features()))
        raise UserError(f"MPIDL_CPU={requested}: this CPU cannot run it; it lacks {missing}")
    if requested not in names:
        raise UserError(f"MPIDL_CPU={requested}: no {path_of(requested)}: {how_to_build()}")
    return names[names.index(requested) :]


def load(build):
    """Return the Library of a build. Raise UserError if it is missing or cannot be loaded."""
    path = path_of(build)
    if build not in built():
        raise UserError(f"no {path}: {how_to_build()}")
    if LANES != 16:  # as in kernels/cpu/lanes.h
        raise UserError(f"{path}: compiled for blocks of 16 images, found blocks of {LANES}")
    return _load(path, build)


@functools.cache
def _load(path, build):
    return Library(path, os.path.join(kernels_folder(), "cpu", "mpidl.h"), build)


def choose():
    """Return the builds that this process could run, best first. The first build can be loaded.

    Better builds that cannot be loaded, for example because they need a newer libc, are skipped.
    Raise UserError if MPIDL_CPU names such a build.
    """
    names = offered()
    while names[0] != "numpy":
        try:
            load(names[0])
            break
        except UserError:
            if os.environ.get("MPIDL_CPU") == names[0]:
                raise
            names = names[1:]
    return names


def running():
    """Return the name of the build that this process runs. The first call selects it."""
    if process.build is None:
        use(choose()[0])
    return process.build


def use(build):
    """Make this process run a build, and return the build's Library, or None for "numpy".

    Raise UserError if the library is missing or cannot be loaded.
    """
    library = None if build == "numpy" else load(build)
    process.build, process.kernels = build, library
    if library is not None and settings.threads > 1:
        library.set_threads(settings.threads)
    return library


def kernels():
    """Return the Library of this process, or None if the build is "numpy".

    The first call selects the build, and raises UserError if MPIDL_CPU is unusable.
    """
    if process.build is None:
        running()
    return process.kernels


def common(offers):
    """Return the best build that every list in `offers` contains. Every list contains "numpy"."""
    return next(build for build in ORDER if all(build in names for names in offers))


def settle(world):
    """Make all ranks of a world run the best build that every rank supports. Collective.

    A rank that already runs a build does not change to a better build, because the ranks of another
    world may rely on the old build. If MPIDL_CPU is unusable on any rank, all ranks raise
    UserError.
    """
    error, names = None, []
    try:
        names = choose()
        if process.build in names:
            names = names[names.index(process.build) :]
    except UserError as unusable:
        error = str(unusable)
    offers = world.broadcast(world.gather((error, names)))
    for text, _ in offers:
        if text is not None:
            raise UserError(text)
    use(common([names for _, names in offers]))
