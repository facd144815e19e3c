"""Import the device fixtures for the tests of the GPU check."""

from gpu_devices import device, emulated

__all__ = ["device", "emulated"]
