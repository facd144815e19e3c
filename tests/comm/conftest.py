"""Import the fixtures of emulated GPUs."""

from gpu_devices import emulated

__all__ = ["emulated"]
