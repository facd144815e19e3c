"""Assemble the GPU backend from the modules that launch the CUDA kernels.

Values per image have the same shape as in every backend, (blocks, *image_shape, 16), and are stored
as NHWC (see `array`). The functions launch kernels or record the launches (`launching`,
`recorder`). They never wait for the device or read a number from it. Sums are folded on each rank
(`fold`), then over the ranks (`sums`).
"""

from mpidl.backends.gather import families, gather

GPU = gather("gpu", families(__package__), fuses_convolutions=True, arrays_on_device=True)
