"""The CUDA kernels as a Backend.

Values per image have the shape they have everywhere, (blocks, *image_shape, 16), and lie in memory
as NHWC (`array`). A function launches kernels, or has them recorded (`launching`, `recorder`); none
waits for the device or looks at a number. Sums go to the fold (`fold`), then over the ranks
(`sums`).
"""

from mpidl.backends.gather import families, gather

GPU = gather("gpu", families(__package__), fuses_convolutions=True, arrays_on_device=True)
