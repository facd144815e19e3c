"""Read each kernel's use of registers, stack and shared memory from NVRTC's log."""

import concurrent.futures
import re
from typing import NamedTuple

from mpidl.backends.gpu import nvrtc

ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.S,
)


class Limits(NamedTuple):
    """Resources of a multiprocessor: threads, blocks of threads, bytes of shared memory."""

    threads: int
    blocks: int
    shared: int


# From the table of compute capabilities in the CUDA C++ Programming Guide.
LIMITS = {
    "sm_80": Limits(2048, 32, 164 << 10),
    "sm_86": Limits(1536, 16, 100 << 10),
    "sm_89": Limits(1536, 24, 100 << 10),
    "sm_90": Limits(2048, 32, 228 << 10),
}
REGISTERS = 1 << 16  # registers of a multiprocessor
PER_WARP = 256  # registers are allocated to warps in multiples of this number
RESERVED = 1 << 10  # bytes of shared memory that each block of threads occupies in addition


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


def occupancy(entry, threads, shared, architecture):
    """Return the resident threads of a multiprocessor as a fraction of the largest number.

    Parameters
    ----------
    entry : dict
        The kernel's resources, as in the result of `parse_log`.
    threads, shared : int
        Threads, and bytes of dynamic shared memory, of a block.
    architecture : str
        A key of LIMITS.
    """
    limits, warps = LIMITS[architecture], -(-threads // 32)
    per_warp = -(-entry["registers"] * 32 // PER_WARP) * PER_WARP
    blocks = min(
        limits.blocks,
        limits.threads // (32 * warps),
        REGISTERS // per_warp // warps,
        limits.shared // (entry["shared"] + shared + RESERVED),
    )
    return 32 * warps * blocks / limits.threads
