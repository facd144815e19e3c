"""NumPy backend: one block at a time, BLAS for the products. The oracle of the others' tests.

Every BLAS call is one block at one fixed shape (16 lanes, full or not), because BLAS picks its
kernel, and with it the rounding, by the shape of the call. Every sum over images goes to the fold
as one leaf per block.
"""
