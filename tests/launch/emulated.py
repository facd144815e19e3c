"""`python emulated.py NAME ...`: `python -m mpidl.NAME ...` where each rank has an emulated GPU.

EMULATED_GPUS: how many there are, which the ranks share where they are fewer (1).
EMULATED_GATHERED: the bytes that a GPU gathers at most, see `sums.GATHERED`. EMULATED_RESIDENT: the
share of its memory that data sets may take, see `on_device.RESIDENT`.
"""

import contextlib
import importlib
import os
import sys
from pathlib import Path
from unittest import mock


def open_gpu(gpu):
    """The Device of a Gpu, in place of `devices.open_gpu`."""
    from emulator import EmulatedDevice

    device = EmulatedDevice()
    device.index, device.identity = gpu.index, gpu.identity
    return device


def visible():
    """What there is, in place of what a driver says."""
    from emulator import EmulatedDevice

    from mpidl.backends.gpu.discovery import Gpu, Visible

    count = int(os.environ.get("EMULATED_GPUS", "1"))
    kind = EmulatedDevice.name, "sm_90", 132, EmulatedDevice.memory
    return Visible(tuple(Gpu(i, f"GPU-{i}", *kind) for i in range(count)), driver_count=count)


def main():
    from mpidl.backends.gpu import sums
    from mpidl.comm import devices, failure, nccl
    from mpidl.data.loading import device_queue

    replaced = [
        (devices, "open_gpu", open_gpu),
        (devices, "visible", visible),
        (nccl, "cuda_aware", lambda: True),  # memory of the device is the host's
        (sums, "GATHERED", int(os.environ.get("EMULATED_GATHERED", sums.GATHERED))),
        (
            device_queue,
            "RESIDENT",
            float(os.environ.get("EMULATED_RESIDENT", device_queue.RESIDENT)),
        ),
    ]
    name = sys.argv.pop(1)
    with contextlib.ExitStack() as stack:  # a pool's rank runs other commands afterwards
        for module, attribute, value in replaced:
            stack.enter_context(mock.patch.object(module, attribute, value))
        failure.run(importlib.import_module(f"mpidl.cli.{name}").main)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # emulator
    main()
