"""Compare every CUDA kernel's use of registers, stack and shared memory with a table.

`PYTHONPATH=.:tests python tests/backends/gpu/resources.py` writes these numbers to resources.json
in this folder. test_gpu_kernels.py compares the numbers of the current kernels with the file.
"""

import json
import os
import sys

from benchmarks.gpu.resources import compile_all
from mpidl.backends.gpu import nvrtc

TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "resources.json")
ARCHITECTURES = ("sm_75", "sm_80", "sm_90")


def label(unit):
    """Return a unit as text, such as "pool POOL_WIDTH=4"."""
    return " ".join([unit.family, *(f"{name}={value}" for name, value in unit.defines)])


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
