"""An op for the sum of two values followed by ReLU, as at the end of a residual block."""

from __future__ import annotations

from typing import Any

from mpidl import backends
from mpidl.backends.deferred import DeferredNormalization, GradientWithSums, addend, in_one_type
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Needs, SumOfCotangents


@op(blocks=True)
def add_relu(a: Blocked, b: Blocked) -> WithVjp[Blocked]:
    """Return relu(a + b). Both values must have the same mini-batch, shape and dtype.

    In float32, the result has the same bytes as the result of separate ops. The backend's attribute
    `fuses_convolutions` must be True. If a or b is a DeferredNormalization, the backend normalizes
    it while it reads it. The backward pass adds up the cotangents from two readers of the result.
    In the same pass over memory, it computes the sums for the batch normalizations of a and b.

    Parameters
    ----------
    a, b
        Values (N, ...).

    Returns
    -------
    Blocked
        The result, with the shape of `a`.
    """
    backend, values = backends.of_value(a), (a, b)
    y = backend.add_relu(*in_one_type(values, addend))

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        parts = dy.parts if isinstance(dy, SumOfCotangents) else (dy,)
        normalizations = [
            value.deferred
            if need and isinstance(value, DeferredNormalization) and value.storage == y.dtype
            else None
            for value, need in zip(values, needs, strict=True)
        ]
        dz, sums = backend.add_relu_dx(
            [part.raw for part in parts], y, normalizations, a.batch.tree
        )
        return tuple(
            a.like(dz) if of_value is None else GradientWithSums(dz, a.batch, of_value, all(needs))
            for of_value in sums
        )

    return a.like(y), vjp
