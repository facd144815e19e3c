"""The GPU backend: the functions of `reference`, with the same arguments, by our CUDA kernels."""
