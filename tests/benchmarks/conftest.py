"""The fixtures of devices, for the check of GPUs."""

from gpu_devices import device, emulated

__all__ = ["device", "emulated"]
