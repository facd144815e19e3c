"""The runtime and driver APIs of CUDA on host memory."""
