"""mpidl: data-parallel training of neural networks on MPI ranks.

The same seed, data and options give the same weights, byte for byte, on any number of ranks.
"""

# A signal may arrive during the imports below.
from mpidl import startup

startup.begin()

if startup.command() is not None:
    from mpidl import listed_folders

    listed_folders.begin()

import os
import sys
from typing import NoReturn

from mpidl import lazy, wings

# Limit BLAS to one thread before NumPy loads. A BLAS may split a matrix product among threads,
# and the order of additions then depends on the number of threads.
for _name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "BLIS_NUM_THREADS"):
    os.environ[_name] = "1"
if "numpy" in sys.modules:
    import threadpoolctl

    threadpoolctl.threadpool_limits(1, user_api="blas")


class _FrontDoor(lazy.LazyPackage):
    """The package mpidl, which suggests its names for those of MATLAB and PyTorch."""

    def missing(self, name: str) -> NoReturn:
        from mpidl import matlab_names

        matlab_names.missing_name(name)


sys.modules[__name__].__class__ = _FrontDoor
sys.meta_path.append(wings.WingFinder)

__version__ = "0.1.0"
