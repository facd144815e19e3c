"""The C kernels as a Backend. What no module here defines is computed by NumPy."""

from mpidl.backends.cpu import (
    activation,
    batchnorm,
    conv,
    dense,
    dropout,
    images,
    join,
    loss,
    lrn,
    optimizer,
    pool,
    transposed,
)
from mpidl.backends.gather import gather
from mpidl.backends.reference.backend import REFERENCE

FAMILIES = (
    *(conv, transposed, dense, batchnorm, activation, pool, lrn, dropout, join),
    *(loss, optimizer, images),
)
CPU = gather("cpu", FAMILIES, fallback=REFERENCE, fuses_convolutions=True)
