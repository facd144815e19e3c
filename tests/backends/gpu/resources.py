"""Registers, stack and shared memory of every kernel, as NVRTC's log tells them.

`PYTHONPATH=.:tests python tests/backends/gpu/resources.py` writes them to
resources.json in the same folder; a test compares.
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
    """A unit in a line: "pool POOL_WIDTH=4"."""
    return " ".join([unit.family, *(f"{name}={value}" for name, value in unit.defines)])


def of_log(log):
    """{kernel: {"registers": n, "stack": bytes, "shared": bytes, "spills": bytes}}."""
    found = {}
    for entry in ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        found[entry["name"]] = {
            "registers": int(entry["registers"]),
            "stack": int(entry["stack"]),
            "shared": int(shared[1]) if shared else 0,
            "spills": int(entry["stores"]) + int(entry["loads"]),
        }
    return found


def compile_all(units, architecture):
    """{unit: its `of_log`}, two compiled at a time; what was compiled before is not compiled again.

    An exception in place of what does not compile.
    """

    def one(unit):
        try:
            return of_log(nvrtc.compiled(unit, architecture)[1])
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(units, pool.map(one, units), strict=True))


def main():
    import variants

    table = {"nvrtc": "{}.{}".format(*nvrtc.find(ARCHITECTURES[-1]).version)}
    for architecture in ARCHITECTURES:
        compiled = compile_all(variants.units(architecture), architecture)
        errors = [str(found) for found in compiled.values() if isinstance(found, Exception)]
        if errors:
            sys.exit("\n".join(errors))
        table[architecture] = {
            f"{label(unit)}: {name}": entry
            for unit, found in compiled.items()
            for name, entry in sorted(found.items())
        }
    with open(TABLE, "w") as file:
        file.write(as_text(table))


def as_text(table):
    """JSON, a line a kernel."""
    parts = [f' "nvrtc": {json.dumps(table["nvrtc"])}']
    for architecture in ARCHITECTURES:
        lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table[architecture].items()]
        parts.append(f' "{architecture}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
