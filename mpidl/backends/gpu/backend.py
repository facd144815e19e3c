"""Create the Backend GPU from the modules that launch the CUDA kernels.

As in every backend, per-image values have the shape (blocks, *image_shape, 16), with 16 images per
block. In memory, images are stored as NHWC (see `array`). The functions launch kernels
(`launching`), or record the launches (`recorder`). No function waits for the device or reads a
scalar from it. Each rank sums over its own images (`fold`), then over the ranks (`sums`).
"""

from mpidl.backends.gather import families, gather

GPU = gather("gpu", families(__package__), fuses_convolutions=True, arrays_on_device=True)
