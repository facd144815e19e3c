"""Read every CUDA kernel's use of registers, stack and shared memory from NVRTC's log.

`PYTHONPATH=.:tests python tests/backends/gpu/resources.py` writes these numbers to resources.json
in this folder. test_gpu_kernels.py compares the numbers of the current kernels with the file.
"""

import concurrent.futures
import json
import os
import re
import sys

from mpidl.backends.gpu import nvrtc

TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "resources.json")
ARCHITECTURES = ("sm_75", "sm_80", "sm_90")
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.S,
)


def label(unit):
    """Return a unit as text, such as "pool POOL_WIDTH=4"."""
    return " ".join([unit.family, *(f"{name}={value}" for name, value in unit.defines)])


def parse_log(log):
    """Return {kernel: {"registers": n, "stack": bytes, "shared": bytes, "spills": bytes}}."""
    kernels = {}
    for entry in ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        kernels[entry["name"]] = {
            "registers": int(entry["registers"]),
            "stack": int(entry["stack"]),
            "shared": int(shared[1]) if shared else 0,
            "spills": int(entry["stores"]) + int(entry["loads"]),
        }
    return kernels


def compile_all(units, architecture):
    """Compile units, two at a time, and return {unit: its resources, or an exception}."""

    def compile_unit(unit):
        try:
            return parse_log(nvrtc.compiled(unit, architecture)[1])
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(units, pool.map(compile_unit, units), strict=True))


def main():
    import variants

    table = {"nvrtc": "{}.{}".format(*nvrtc.find(ARCHITECTURES[-1]).version)}
    for architecture in ARCHITECTURES:
        compiled = compile_all(variants.units(architecture), architecture)
        errors = [str(value) for value in compiled.values() if isinstance(value, Exception)]
        if errors:
            sys.exit("\n".join(errors))
        table[architecture] = {
            f"{label(unit)}: {name}": entry
            for unit, entries in compiled.items()
            for name, entry in sorted(entries.items())
        }
    with open(TABLE, "w") as file:
        file.write(as_text(table))


def as_text(table):
    """Return the table as JSON, one line per kernel."""
    parts = [f' "nvrtc": {json.dumps(table["nvrtc"])}']
    for architecture in ARCHITECTURES:
        lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table[architecture].items()]
        parts.append(f' "{architecture}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
