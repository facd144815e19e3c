"""GPU backend: runs the kernels of kernels/cuda on Arrays in device memory (see `array`)."""
