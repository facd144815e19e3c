"""The NumPy functions as a Backend."""

from mpidl.backends.gather import gather
from mpidl.backends.reference import (
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

FAMILIES = (
    *(conv, transposed, dense, batchnorm, activation, pool, lrn, dropout, join),
    *(loss, optimizer, images),
)
REFERENCE = gather("reference", FAMILIES)
