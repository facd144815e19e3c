"""Stand in for CuPy on host memory: the names that mpidl uses, with the limits of a GPU.

A process that finds this folder before CuPy, and `libraries` in MPIDL_NVRTC and LD_LIBRARY_PATH,
computes on an emulated GPU through mpidl's unchanged `CudaDevice`, NVRTC and cubin cache. The
emulator (`tests/emulator`) runs the kernels. `cuda.runtime` and `cuda.driver` check what a GPU
checks: handles, addresses, limits of launches, and which calls a capture permits.
"""

__version__ = "14.2.0"
