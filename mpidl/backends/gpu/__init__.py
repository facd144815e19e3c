"""GPU backend: the CUDA kernels of kernels/cuda, on arrays that lie in device memory (`array`)."""
