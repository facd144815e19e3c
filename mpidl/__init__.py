"""mpidl: data-parallel training of convolutional networks on MPI ranks.

The same seed, data and options give the same weights, byte for byte, on any number of ranks.
"""

import os
import sys

# One BLAS thread, before NumPy loads: a BLAS may split a product by its number of threads, and
# with it the order of additions.
for _name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "BLIS_NUM_THREADS"):
    os.environ[_name] = "1"
if "numpy" in sys.modules:
    import threadpoolctl

    threadpoolctl.threadpool_limits(1, user_api="blas")
