"""Products of per-image values, as in squeeze-and-excite gates, and a factor for each channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidl import backends
from mpidl.backends.deferred import in_one_type
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Array, Needs
from mpidl.ops import check

__all__ = ["scale"]

Shape = tuple[int, ...]


def product_shape(*images: Sequence[int]) -> Shape | None:
    """Return the shape of the product of values with these shapes of an image, or None.

    Shapes broadcast if they have equally many axes, of equal size or 1. Features (C,) and images
    (C, H, W) broadcast, too.
    """
    ndim = max(map(len, images))
    if any(len(image) not in (1, ndim) for image in images) or ndim > 3:
        return None
    shapes = [(*image, *(1,) * (ndim - len(image))) for image in images]
    if any(len(set(sizes) - {1}) > 1 for sizes in zip(*shapes, strict=True)):
        return None
    return tuple(map(max, *shapes))


def is_product(a: Any, b: Any) -> bool:
    """Return whether `multiply_blocked` computes the product of two values."""
    if not (isinstance(a, Blocked) and isinstance(b, Blocked)):
        return False
    if a.batch is not b.batch or a.dtype != b.dtype:
        return False
    return product_shape(a.image_shape, b.image_shape) is not None


def _in_memory(x: Blocked) -> Any:
    """Return an array that has the image shape of x and its order in memory."""
    stored = x.stored_array
    return stored if stored.shape[1:-1] == x.image_shape else x.raw


@op(blocks=True)
def multiply_blocked(a: Blocked, b: Blocked) -> WithVjp[Blocked]:
    """Return a * b for two values per image whose shapes broadcast."""
    backend = backends.of_value(a)

    def operands() -> list[Any]:
        return in_one_type((a, b), lambda value: value.raw)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        first, second = operands()
        return (
            a.like(backend.multiply_dx(dy.raw, second, _in_memory(a))) if needs[0] else None,
            b.like(backend.multiply_dx(dy.raw, first, _in_memory(b))) if needs[1] else None,
        )

    return a.like(backend.multiply(*operands())), vjp


@op(blocks=True)
def scale(x: Blocked, factors: Array) -> WithVjp[Blocked]:
    """Return x * factors, with a learnable factor for each channel.

    Parameters
    ----------
    x
        The input, (N, C, ...).
    factors
        The factors, (C,).

    Returns
    -------
    Blocked
        The result, with the shape of `x`; a Var during differentiation.

    Raises
    ------
    ValueError
        If `factors` has another shape.

    Notes
    -----
    This is the layer scale of Touvron et al., "Going deeper with image transformers", 2021,
    arXiv:2103.17239.
    """
    check.images("scale", x)
    if factors.shape != x.shape[1:2]:
        raise ValueError(
            f"scale: expected factors {x.shape[1:2]} for x {x.shape}, got {factors.shape}"
        )
    backend = backends.of_value(x)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        return (
            x.like(backend.scale_channels(dy.raw, factors)) if needs[0] else None,
            backend.scale_channels_dfactor(dy.raw, x.raw, x.batch.tree) if needs[1] else None,
        )

    return x.like(backend.scale_channels(x.raw, factors)), vjp
