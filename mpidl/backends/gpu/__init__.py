"""GPU backend: runs the CUDA kernels of kernels/cuda on arrays in device memory (`array`)."""
