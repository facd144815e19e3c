"""C backend: the compiled kernels of kernels/cpu; what is off the path of a step is NumPy's."""
