"""Run a command of mpidl with emulated GPUs.

`python emulated.py NAME ...` is like `python -m mpidl.NAME ...`, but each rank has an emulated GPU.
Environment variables:

EMULATED_GPUS
    Number of GPUs, by default 1. If there are more ranks than GPUs, ranks share GPUs.
EMULATED_NCCL
    Whether NCCL is available, which MPI then stands in for.
EMULATED_GATHERED
    Maximum size in bytes of a node of which a GPU gathers all nodes; see `sums.GATHERED`.
EMULATED_BUCKET
    Size in bytes of a bucket of gradients; see `reducer.GPU_BUCKET_BYTES`.
EMULATED_RESIDENT
    Fraction of the GPU's memory that data sets may occupy; see `device_queue.RESIDENT`.
"""

import contextlib
import os
import sys
from pathlib import Path
from unittest import mock


def open_gpu(gpu):
    """Return an emulated device for a Gpu. This function replaces `devices.open_gpu`."""
    from emulator import EmulatedDevice

    device = EmulatedDevice()
    device.index, device.identity = gpu.index, gpu.identity
    return device


def visible():
    """Return the emulated GPUs. This function replaces the query of a driver."""
    from emulator import EmulatedDevice

    from mpidl.backends.discovery import Gpu, Visible

    count = int(os.environ.get("EMULATED_GPUS", "1"))
    kind = EmulatedDevice.name, "sm_90", 132, EmulatedDevice.memory
    return Visible(tuple(Gpu(i, f"GPU-{i}", *kind) for i in range(count)), driver_count=count)


def main():
    import nccl_on_mpi

    import mpidl_command
    from mpidl.backends.gpu import sums
    from mpidl.comm import nccl, reducer
    from mpidl.data.loading import device_queue
    from mpidl.ranks import devices, failure

    gathered = int(os.environ.get("EMULATED_GATHERED", sums.GATHERED))
    bucket = int(os.environ.get("EMULATED_BUCKET", reducer.GPU_BUCKET_BYTES))
    resident = float(os.environ.get("EMULATED_RESIDENT", device_queue.RESIDENT))
    replacements = [
        (devices, "open_gpu", open_gpu),
        (devices, "visible", visible),
        (nccl, "cuda_aware", lambda: True),  # an emulated device uses host memory
        (sums, "GATHERED", gathered),
        (reducer, "GPU_BUCKET_BYTES", bucket),
        (device_queue, "RESIDENT", resident),
    ]
    name = sys.argv.pop(1)
    with contextlib.ExitStack() as stack:  # undo the changes, because a pool runs other commands
        for module, attribute, value in replacements:
            stack.enter_context(mock.patch.object(module, attribute, value))
        if "EMULATED_NCCL" in os.environ:
            stack.enter_context(nccl_on_mpi.installed())
        failure.run(mpidl_command.load(name))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("", "support")]  # emulator
    main()
