"""Read the sources and parameters of the CUDA kernels, and check the arguments of launches.

The sources are in kernels/cuda, one .cu file per family of kernels. Each file is compiled with the
text of common.cuh prepended. A kernel has the name of its CUDA function. The parameters come from
the function's declaration, so an argument of the wrong type raises an error.
"""

import ctypes
import functools
import os
from typing import Any, NamedTuple

import numpy as np

from mpidl import phases
from mpidl.backends import declarations
from mpidl.backends.cpu import builds
from mpidl.core.values import BF16

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
# The types of arrays of `value` (common.cuh): for bfloat16, a unit is compiled with BF16 defined.
VALUES = np.dtype("f4"), BF16
RESULTS = [*VALUES]  # the types of arrays of `result` (conv_gemm.cu), whatever the other arrays are
NEEDS = {"conv_dweight": 80, "conv_gemm": 80}  # {family: oldest GPU architecture that can run it}


class Unit(NamedTuple):
    """A compilation unit: the source of a family with one set of preprocessor definitions."""

    family: str  # for example "pool", for kernels/cuda/pool.cu
    defines: tuple = ()  # (("CV_K", 20), ...), sorted

    @property
    def text(self):
        """The texts of common.cuh and the family's .cu file."""
        return source("common.cuh") + f'#line 1 "{self.family}.cu"\n' + source(f"{self.family}.cu")


class Argument(NamedTuple):
    """A parameter of a kernel: an array of a type in `elements`, or a number of type `ctype`."""

    name: str
    elements: Any = None  # NumPy dtypes
    ctype: Any = None
    is_const: bool = True  # whether the kernel only reads the array


class Launch(NamedTuple):
    """A kernel with its arguments, grid and block: everything that a device needs to run it."""

    unit: Unit
    name: str
    grid: tuple
    block: tuple
    shared: int  # bytes of dynamic shared memory
    arguments: tuple  # each is an Array, a Table, a number or None
    parameters: tuple  # an Argument for each argument
    place: str = ""  # the part of the training step, such as "backward / conv2"

    def values(self):
        """Return the arguments as ctypes values; all addresses must be known."""
        values = []
        for value, parameter in zip(self.arguments, self.parameters, strict=True):
            if parameter.elements is None:
                values.append(parameter.ctype(value))
            else:
                values.append(ctypes.c_void_p(0 if value is None else value.address))
        return values


def folder():
    """Return the path of kernels/cuda in this checkout or installation."""
    return os.path.join(builds.kernels_folder() or "", "cuda")


def families():
    """Return the sorted names of all families."""
    return sorted(name[:-3] for name in os.listdir(folder()) if name.endswith(".cu"))


@functools.cache
def source(name):
    """Return the text of a file in kernels/cuda. Files of kernels/ that it includes are inserted.

    The cubin cache identifies a unit by its text, and NVRTC needs no path to search for files.
    """
    with open(os.path.join(folder(), name)) as file:
        lines = file.read().split("\n")
    for i, line in enumerate(lines):
        if line.startswith("#include "):
            included = line.split('"')[1]
            with open(os.path.join(builds.kernels_folder(), included)) as file:
                lines[i] = f'#line 1 "{included}"\n{file.read()}#line {i + 2} "{name}"'
    return "\n".join(lines)


def signatures(text):
    """Return {kernel: (Argument, ...)} of the kernels that a source text defines."""
    return {
        name: tuple(map(_argument, function.parameters))
        for name, function in declarations.kernels(text).items()
    }


def _argument(parameter):
    if parameter.is_pointer:
        kinds = {"value": VALUES, "result": RESULTS}
        elements = kinds.get(parameter.type) or (np.dtype(ELEMENTS[parameter.type]),)
        return Argument(parameter.name, elements, is_const=parameter.is_const)
    return Argument(parameter.name, ctype=NUMBERS[parameter.type])


@functools.cache
def _index():
    """Return {kernel: (family, parameters)} for the kernels of all families."""
    kernels = {}
    for family in families():
        for name, arguments in signatures(source(f"{family}.cu")).items():
            if name in kernels:
                raise ValueError(
                    f"kernel {name} is defined in both {kernels[name][0]}.cu and {family}.cu"
                )
            kernels[name] = (family, arguments)
    return kernels


def make(name, grid, block, arguments, shared=0, defines=None):
    """Check the arguments of a kernel against the kernel's declaration, and return a Launch.

    Raise TypeError if the arguments do not match the declaration.
    """
    family, parameters = _index()[name]
    if len(arguments) != len(parameters):
        raise TypeError(f"{name}: expected {len(parameters)} arguments, got {len(arguments)}")
    values = VALUES  # the type of the arrays of `value`, once one is known
    for value, parameter in zip(arguments, parameters, strict=True):
        if parameter.elements is not None:
            dtype = None if value is None else getattr(value, "dtype", type(value).__name__)
            elements = values if parameter.elements is VALUES else parameter.elements
            if dtype is not None and dtype not in elements:
                raise TypeError(
                    f"{name}: expected {parameter.name} of type "
                    f"{' or '.join(map(str, elements))}, got {dtype}"
                )
            if elements is values and dtype is not None:
                values = (dtype,)
        elif not isinstance(value, (int, float, np.number)):
            raise TypeError(
                f"{name}: expected a number as {parameter.name}, got {type(value).__name__}"
            )
    defines = {**(defines or {}), **({"BF16": 1} if values == (BF16,) else {})}
    unit = Unit(family, tuple(sorted(defines.items())))
    sizes = _three(grid), _three(block), shared
    return Launch(unit, name, *sizes, tuple(arguments), parameters, phases.place())


def _three(size):
    size = (size,) if isinstance(size, int) else tuple(size)
    return tuple(int(n) for n in (*size, 1, 1)[:3])
