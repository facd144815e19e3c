"""NumPy backend, with which the tests compare the other backends.

It computes one block at a time and uses BLAS for matrix products. BLAS selects its kernel by the
shape of a call, and the kernel determines the rounding. Therefore every call has one block with all
16 lanes, used or not. Sums over images have one leaf per block in the fold tree.
"""
