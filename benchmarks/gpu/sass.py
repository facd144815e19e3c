"""`python -m benchmarks gpu --sass`: count the instructions in the main loop of conv_gemm.

The command needs no GPU. NVRTC compiles the kernel, and nvdisasm disassembles it to SASS, the
instructions of a GPU. A loop ends with a branch to an earlier instruction. The main loop is the
innermost loop with instructions of the tensor cores (HMMA). One iteration multiplies a tile over a
depth of 32, or 64 in bfloat16. The count includes each instruction of the loop once, also those of
inner loops.
"""

import functools
import glob
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.gpu import compiling
from mpidl.backends import settings
from mpidl.backends.gpu import array, conv, kernels, launching, nvrtc
from mpidl.backends.shapes import Geometry
from mpidl.core.blocks import LANES
from mpidl.errors import UserError

ARCHITECTURES = "sm_80", "sm_86", "sm_90", "sm_120"
PRECISIONS = "fp32", "tf32", "bf16"
LABEL = re.compile(r"(\.L_\w+):")
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
BRANCH = re.compile(r"\bBRA\b.*`\((\.L_\w+)\)")


class Loop(NamedTuple):
    """A loop: its number of instructions, and how many of them multiply on tensor cores."""

    instructions: int
    products: int


def main() -> dict:
    """Print the main loops, and return them for the JSON file."""
    head = "precision", "architecture", "instructions", "HMMA"
    by_name = {p: {a: main_loop(conv_unit(p), a) for a in ARCHITECTURES} for p in PRECISIONS}
    rows = [(p, a, *map(str, loop)) for p, loops in by_name.items() for a, loop in loops.items()]
    print("main loop of conv_gemm, which multiplies for a depth of 32, or 64 in bf16")
    report.print_table([head, *rows], left=2)
    return {"sass": {p: {a: v._asdict() for a, v in loops.items()} for p, loops in by_name.items()}}


@functools.cache
def find() -> str | None:
    """Return the path of nvdisasm, from pip, a CUDA toolkit or PATH, or None."""
    spec = importlib.util.find_spec("nvidia")
    folders = [*((spec and spec.submodule_search_locations) or ())]
    paths = [path for f in folders for path in glob.glob(f"{f}/*/bin/nvdisasm")]
    toolkits = filter(None, map(os.environ.get, ("CUDA_PATH", "CUDA_HOME")))
    paths += [f"{folder}/bin/nvdisasm" for folder in (*toolkits, "/usr/local/cuda")]
    return next(filter(os.path.exists, paths), shutil.which("nvdisasm"))


def disassemble(cubin: bytes) -> str:
    """Return the SASS of a cubin. Raise UserError if nvdisasm is not installed."""
    program = find()
    if program is None:
        raise UserError("found no nvdisasm: pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [program, "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def loops(text: str) -> list[Loop]:
    """Return the loops of a SASS text, from the smallest to the largest."""
    places: dict[str, int] = {}
    instructions: list[str] = []
    for line in text.splitlines():
        if label := LABEL.match(line):
            places[label[1]] = len(instructions)
        elif match := INSTRUCTION.match(line):
            instructions.append(match[1])
    sizes = []
    for i, instruction in enumerate(instructions):
        branch = BRANCH.search(instruction)
        start = places.get(branch[1], i) if branch else i
        if start < i:  # a jump to itself only fills the end of the program
            sizes.append(_loop(instructions[start : i + 1]))
    return sorted(sizes)


def _loop(instructions: Sequence[str]) -> Loop:
    return Loop(len(instructions), sum("HMMA" in text for text in instructions))


def main_loop(unit: kernels.Unit, architecture: str) -> Loop:
    """Return the innermost loop with products of a unit's kernel."""
    text = disassemble(nvrtc.cubin(unit, architecture))
    innermost = next((loop for loop in loops(text) if loop.products), None)
    if innermost is None:
        raise RuntimeError(f"{unit.family}: no loop with products in the SASS for {architecture}")
    return innermost


def conv_unit(precision: str) -> kernels.Unit:
    """Return the unit of a forward 3x3 convolution of 64 channels by 64 filters."""
    device, before = compiling.Collector(compiling.Addresses("sm_90", 132)), settings.precision
    try:
        launching.open(device)
        settings.precision = precision
        x = array.empty_lanes((16, 64, 32, 32, LANES))
        weight = array.filters(np.zeros((64, 64, 3, 3), np.float32))
        conv.conv2d(x, weight, None, Geometry((1, 1), ((1, 1), (1, 1)), (1, 1), 1))
    finally:
        settings.precision = before
        launching.open(None)
    (unit,) = (unit for unit in device.units if unit.family == "conv_gemm")
    defines = dict(unit.defines)
    vector = 8 if precision == "bf16" else 4
    if (defines["BM"], defines["BN"], defines["VECTOR"]) != (128, 64, vector):
        raise RuntimeError(f"expected a tile of 128 x 64 and vectors of {vector}, got {defines}")
    return unit
