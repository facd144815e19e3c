"""NumPy backend: the reference that tests compare the other backends against.

The backend computes one block of 16 images at a time and uses BLAS for matrix products. BLAS
selects a kernel by the shapes of the matrices, and the kernel determines the rounding. Therefore
every call gets one whole block, including lanes (image slots) that hold no image. Sums over images
have one leaf per block in the reduction tree of `fold`.
"""
