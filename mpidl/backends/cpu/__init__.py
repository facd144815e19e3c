"""C backend: the compiled kernels of kernels/cpu, and NumPy for functions without a kernel."""
