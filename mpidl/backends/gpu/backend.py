"""Assemble the GPU backend from the modules that launch the CUDA kernels.

As in every backend, per-image values have the shape (blocks, *image_shape, 16), with 16 images per
block. The memory layout is NHWC (see `array`). The functions launch kernels (`launching`) or record
the launches (`recorder`). No function waits for the device or reads a scalar from it. Sums over
images are computed on each rank (`fold`), then over the ranks (`sums`).
"""

from mpidl.backends.gather import families, gather

GPU = gather("gpu", families(__package__), fuses_convolutions=True, arrays_on_device=True)
