"""Parse the declarations of C functions in kernels/cpu/mpidl.h and of CUDA kernels in a .cu file.

kernels/build.py loads this file by its path, so it uses only Python's standard library.
"""

import re
from typing import NamedTuple

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
PARAMETERS = r"\(((?:[^()]|\([^()]*\))*)\)"
EXPORTED = re.compile(rf"((?:const )?\w+ \*?)mpidl_(\w+){PARAMETERS};")
KERNEL = re.compile(
    rf'extern "C" __global__ (void)\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+){PARAMETERS}'
)
VALUE = re.compile(r"(const )?([\w ]+?) (\* )?(\w+)")


class Value(NamedTuple):
    """A parameter or the result of a function, such as `const long long *counts`.

    `type` is "long long" in this example, and "" if the parameter is itself a function.
    """

    name: str
    type: str
    is_pointer: bool = False
    is_const: bool = False


class Function(NamedTuple):
    result: Value
    parameters: tuple


def exported(header):
    """Return {name without the prefix mpidl_: Function} of a header, in the header's order.

    A function with arguments of the type `value` exists twice: NAME, for float, and NAME_bf16, for
    bfloat16 (see kernels/cpu/value.h). The functions for bfloat16 come last.
    """
    functions = _functions(header, EXPORTED)
    narrow = {f"{k}_bf16": f for k, f in functions.items() if has_values(f)}
    return {
        **{name: _of_type(function, "float") for name, function in functions.items()},
        **{name: _of_type(function, "uint16_t") for name, function in narrow.items()},
    }


def has_values(function):
    """Return whether a function of a header has arguments of the type `value`."""
    return any(parameter.type == "value" for parameter in function.parameters)


def _of_type(function, kind):
    parameters = (p._replace(type=kind) if p.type == "value" else p for p in function.parameters)
    return function._replace(parameters=tuple(parameters))


def kernels(source):
    """Return {name: Function} of the kernels that a CUDA source defines, in the source's order."""
    return _functions(source, KERNEL)


def _functions(text, pattern):
    functions = {}
    for result, name, inside in pattern.findall(COMMENT.sub("", text)):
        # splitting at commas is safe: the parameter list of a function pointer is always (void)
        parameters = [] if inside.strip() in ("", "void") else inside.split(",")
        functions[name] = Function(_value(f"{result} {name}"), tuple(map(_value, parameters)))
    return functions


def _value(text):
    if "(" in text:
        return Value(text.strip(), "")
    words = " ".join(text.replace("__restrict__", "").replace("*", " * ").split())
    match = VALUE.fullmatch(words)
    assert match, text
    const, kind, star, name = match.groups()
    return Value(name, kind, bool(star), bool(const))
