"""CPU backend: runs the compiled kernels of kernels/cpu, or NumPy if there is no kernel."""
