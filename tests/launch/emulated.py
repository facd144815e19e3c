"""`python emulated.py NAME ...`: `python -m mpidl.NAME ...` where each rank has an emulated GPU.

EMULATED_GPUS: how many there are, which the ranks share where they are fewer (1).
EMULATED_GATHERED: the bytes that a GPU gathers at most, see `sums.GATHERED`.
"""

import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # emulator

from emulator import EmulatedDevice  # noqa: E402

from mpidl.backends.gpu import sums  # noqa: E402
from mpidl.backends.gpu.visible import Gpu, Visible  # noqa: E402
from mpidl.comm import devices, guard, nccl  # noqa: E402


def opened(gpu):
    """The Device of a Gpu, in place of `devices.opened`."""
    device = EmulatedDevice()
    device.index, device.identity = gpu.index, gpu.identity
    return device


def visible():
    """What there is, in place of what a driver says."""
    count = int(os.environ.get("EMULATED_GPUS", "1"))
    kind = EmulatedDevice.name, "sm_90", 132, EmulatedDevice.memory
    return Visible(tuple(Gpu(i, f"GPU-{i}", *kind) for i in range(count)), there=count)


if __name__ == "__main__":
    devices.opened, devices.visible = opened, visible
    sums.GATHERED = int(os.environ.get("EMULATED_GATHERED", sums.GATHERED))
    nccl.cuda_aware = lambda: True  # memory of the device is the host's
    name = sys.argv.pop(1)
    guard.run(importlib.import_module(f"mpidl.cli.{name}").main)
