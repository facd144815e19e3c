"""NumPy backend, with which the tests compare the other backends.

The backend computes one block of 16 images at a time and uses BLAS for matrix products. BLAS
selects a kernel by the shapes of the matrices, and the kernel determines the rounding. Therefore
every call gets one block with all 16 lanes (the slots of images), used or not. A sum over images
has one leaf per block in the reduction tree of `fold`.
"""
