"""GPU backend, which runs the kernels in kernels/cuda on Arrays in device memory (see `array`)."""
