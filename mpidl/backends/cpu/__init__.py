"""C backend: the functions of `reference`, with the same arguments, by the compiled kernels."""
