"""The CUDA kernels: their sources, their parameters, and how a launch is put together.

Sources lie in kernels/cuda, one .cu per family; each is compiled with the text of common.cuh before
it. A kernel has the name of its function. Its parameters are read from the declaration, as `builds`
reads mpidl.h: launching it with an array of another type is an error, not a wrong number.
"""

import ctypes
import functools
import os
import re
from typing import Any, NamedTuple

import numpy as np

from mpidl.backends.cpu import builds

NUMBERS = {
    "int": ctypes.c_int,
    "long long": ctypes.c_longlong,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
ELEMENTS = {
    "float": "f4",
    "double": "f8",
    "int": "i4",
    "long long": "i8",
    "unsigned char": "u1",
}
NEEDS = {"conv_dweight": 80, "conv_gemm": 80}  # of families: the oldest architecture they are for
KERNEL = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(([^)]*)\)', re.S
)


class Unit(NamedTuple):
    """What is compiled at once: a family's text with one set of definitions."""

    family: str  # "pool": of kernels/cuda/pool.cu
    defines: tuple = ()  # (("CV_K", 20), ...), sorted

    @property
    def text(self):
        """common.cuh and the family's source; none of our files includes another."""
        return source("common.cuh") + f'#line 1 "{self.family}.cu"\n' + source(f"{self.family}.cu")


class Argument(NamedTuple):
    """One parameter of a kernel: an array of `element`, or a number of `ctype`."""

    name: str
    element: Any = None  # a NumPy dtype
    ctype: Any = None


class Launch(NamedTuple):
    """One kernel with all it needs to run."""

    unit: Unit
    name: str
    grid: tuple
    block: tuple
    shared: int  # bytes of dynamic shared memory
    arguments: tuple  # Arrays, Tables, numbers and None
    parameters: tuple  # Argument of each

    def values(self):
        """Return the arguments as ctypes values; the addresses must be known."""
        values = []
        for value, parameter in zip(self.arguments, self.parameters, strict=True):
            if parameter.element is None:
                values.append(parameter.ctype(value))
            else:
                values.append(ctypes.c_void_p(0 if value is None else value.address))
        return values


def folder():
    """Return kernels/cuda of this checkout or installation."""
    return os.path.join(builds.kernels_folder() or "", "cuda")


def families():
    """Return the names of the families, sorted."""
    return sorted(name[:-3] for name in os.listdir(folder()) if name.endswith(".cu"))


@functools.cache
def source(name):
    """Return the text of a file of kernels/cuda."""
    with open(os.path.join(folder(), name)) as file:
        return file.read()


def signatures(text):
    """Return {kernel: (Argument, ...)} of all kernels that a source declares."""
    kernels = {}
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    for name, inside in KERNEL.findall(text):
        arguments = []
        for declaration in inside.split(","):
            words = re.sub(r"\bconst\b|\b__restrict__\b", "", declaration).strip()
            kind, name_of = re.fullmatch(r"([\w ]+?\s*\*?)\s*(\w+)", words).groups()
            if kind.endswith("*"):
                element = np.dtype(ELEMENTS[kind.rstrip("* ").strip()])
                arguments.append(Argument(name_of, element=element))
            else:
                arguments.append(Argument(name_of, ctype=NUMBERS[kind.strip()]))
        kernels[name] = tuple(arguments)
    return kernels


@functools.cache
def _index():
    """Return {kernel: (family, its arguments)}."""
    kernels = {}
    for family in families():
        for name, arguments in signatures(source(f"{family}.cu")).items():
            if name in kernels:
                raise ValueError(f"kernel {name} is in {kernels[name][0]}.cu and in {family}.cu")
            kernels[name] = (family, arguments)
    return kernels


def make(name, grid, block, arguments, shared=0, defines=None):
    """Return the Launch of a kernel.

    Raises TypeError if the arguments do not match the kernel's declaration.
    """
    family, parameters = _index()[name]
    if len(arguments) != len(parameters):
        raise TypeError(f"{name}: takes {len(parameters)} arguments, got {len(arguments)}")
    for value, parameter in zip(arguments, parameters, strict=True):
        if parameter.element is not None:
            dtype = None if value is None else getattr(value, "dtype", type(value).__name__)
            if dtype is not None and dtype != parameter.element:
                raise TypeError(f"{name}: {parameter.name} is of {parameter.element}, got {dtype}")
        elif not isinstance(value, (int, float, np.number)):
            raise TypeError(f"{name}: {parameter.name} is a number, got {type(value).__name__}")
    unit = Unit(family, tuple(sorted((defines or {}).items())))
    return Launch(unit, name, _three(grid), _three(block), shared, tuple(arguments), parameters)


def _three(size):
    size = (size,) if isinstance(size, int) else tuple(size)
    return tuple(int(n) for n in (*size, 1, 1)[:3])
