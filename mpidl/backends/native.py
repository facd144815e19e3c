"""The compiled kernels: which build this process runs, and how Python calls it."""

import ctypes
import functools
import os
import re

import numpy as np

TYPES = {
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "void": None,
}


@functools.cache
def _pointer(name, const):
    """The type of an array argument: C-contiguous, of this element type; None is NULL."""
    dtype = np.dtype({"float": "f4", "double": "f8"}.get(name, name.removesuffix("_t")))

    def from_param(array):
        if array is None:
            return None
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise TypeError(
                f"expected a C-ordered array of {dtype}, got {array.dtype} of shape {array.shape} "
                f"with strides {array.strides}"
            )
        if not const and not array.flags.writeable:
            raise TypeError(f"expected an array that can be written, of shape {array.shape}")
        return ctypes.c_void_p(array.ctypes.data)

    return type(f"{name}*", (), {"from_param": staticmethod(from_param)})


def _type(text):
    match = re.fullmatch(r"(const )?(\w+) ?(\*?)\w*", text.strip())
    if match is None:
        return ctypes.c_void_p  # a function
    const, name, star = match.groups()
    return _pointer(name, bool(const)) if star else TYPES[name]


def declarations(header):
    """{name: (result type, argument types)} of the functions that a header declares."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    found = {}
    for result, name, arguments in re.findall(r"(\w+) mpidl_(\w+)\(((?:[^()]|\([^()]*\))*)\);", text):
        # the commas of a function argument's own (void) do not matter: it has one argument
        types = [] if arguments.strip() == "void" else [_type(a) for a in arguments.split(",")]
        found[name] = (TYPES[result], types)
    return found


class Library:
    """A loaded build: its functions as attributes, without the prefix `mpidl_`."""

    def __init__(self, path, header, build):
        self.path, self.build = path, build
        library = ctypes.CDLL(path)
        with open(header) as file:
            for name, (result, types) in declarations(file.read()).items():
                function = getattr(library, f"mpidl_{name}")
                function.restype, function.argtypes = result, types
                setattr(self, name, function)


def _folder():
    """kernels/ of this checkout, or what was installed of it."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for folder in (
        os.path.join(os.path.dirname(package), "kernels"),
        os.path.join(package, "kernels"),
    ):
        if os.path.isfile(os.path.join(folder, "cpu", "mpidl.h")):
            return folder
    return None


@functools.cache
def library():
    """The Library this process runs, None where NumPy does the work."""
    build = os.environ.get("MPIDL_CPU", "x86-64-v4")
    folder = _folder()
    path = folder and os.path.join(folder, "lib", f"libmpidl-{build}.so")
    if not path or not os.path.isfile(path):
        return None
    return Library(path, os.path.join(folder, "cpu", "mpidl.h"), build)
