"""Turn a function that returns a value and its vjp into an op, which is recorded on the tape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, overload

import numpy as np

from mpidl.core.blocks import Blocked, from_images
from mpidl.core.fold import Counter, Partial
from mpidl.core.tape import Needs, Var, value_of
from mpidl.core.values import is_device_array

Vjp: TypeAlias = Callable[..., Sequence[Any]]
X_contra = TypeVar("X_contra", contravariant=True)
Y = TypeVar("Y")
Y_co = TypeVar("Y_co", covariant=True)
Options = ParamSpec("Options")
Kind = TypeVar("Kind", bound=Var | Blocked | np.ndarray)
WithVjp: TypeAlias = tuple[Y, Vjp]  # the result of a forward function


class Op(Protocol[X_contra, Options, Y_co]):
    """Type of an op, with the signature of its forward function.

    If an argument is a Var, the result is a Var.
    """

    __name__: str

    @overload
    def __call__(self, x: X_contra, /, *args: Options.args, **options: Options.kwargs) -> Y_co: ...
    @overload
    def __call__(self, x: Var, /, *args: Options.args, **options: Options.kwargs) -> Var: ...


class ArrayOp(Protocol):
    """Type of an op on plain arrays. The result has the type of the first non-scalar argument."""

    __name__: str

    @overload
    def __call__(self, x: Kind, /, *args: Any, **options: Any) -> Kind: ...
    @overload
    def __call__(self, x: float, y: Kind, /, *args: Any, **options: Any) -> Kind: ...


ArrayForward: TypeAlias = Callable[..., tuple[np.ndarray, Vjp]]


@overload
def op(forward: ArrayForward, *, blocks: Literal[False] = False) -> ArrayOp: ...
@overload
def op(
    forward: None = None, *, blocks: Literal[False] = False
) -> Callable[[ArrayForward], ArrayOp]: ...
@overload
def op(
    forward: None = None, *, blocks: Literal[True]
) -> Callable[
    [Callable[Concatenate[X_contra, Options], WithVjp[Y_co]]], Op[X_contra, Options, Y_co]
]: ...
def op(forward: Callable[..., WithVjp[Any]] | None = None, *, blocks: bool = False) -> Any:
    """Turn a function `forward(*arrays, **options) -> (y, vjp)` into an op.

    Parameters
    ----------
    forward
        A function of plain arrays, which the op calls once per block if an argument is blocked, and
        once otherwise. For a block of n <= 16 images, it gets C-ordered arrays (n, ...) and the
        full replicated arguments, and returns y of shape (n, ...). On a rank without blocks, it
        gets one image of zeros, which shows the shape of y. `vjp(dy)` returns a tuple with one
        cotangent per positional argument, or None for one that has none.
    blocks
        If True, forward gets Blocked values, with all images of the rank, and `vjp(dy, needs)`
        returns Partials for replicated arguments. needs[i] is whether argument i needs a cotangent.

    Returns
    -------
    callable
        The op. It returns a Var if an argument is a Var.

    Raises
    ------
    TypeError
        If an op without `blocks` is called with a Partial or an array on a GPU.
    ValueError
        If forward or vjp of an op without `blocks` returns the wrong number of arrays, or an array
        of the wrong shape.
    """
    if forward is None:
        return functools.partial(op, blocks=blocks)
    name = forward.__name__.removeprefix("_")  # the name in errors and timelines

    @functools.wraps(forward)
    def wrapped(*args: Any, **options: Any) -> Any:
        values = [value_of(a) for a in args]
        y, vjp = (
            forward(*values, **options) if blocks else _by_block(name, forward, values, options)
        )
        if not any(isinstance(a, Var) for a in args):
            return y
        return Var(y, args, vjp, name)

    return wrapped


def _by_block(
    name: str, forward: Callable[..., WithVjp[Any]], values: list[Any], options: dict[str, Any]
) -> WithVjp[Any]:
    """Run an op on plain arrays once per block of this rank, or once if no argument is blocked."""
    if any(isinstance(v, Partial) for v in values):
        raise TypeError(
            f"{name}: got a Partial, which is not yet summed over the ranks; before "
            "world.gplus(value), only sums and multiples of it are defined"
        )
    refuse_gpu(name, *values)
    values = [v.stored() if isinstance(v, Blocked) else v for v in values]
    blocked = [v for v in values if isinstance(v, Blocked)]
    if not blocked:
        y, vjp = forward(*values, **options)
        return np.asarray(y), lambda dy, needs: _check_cotangents(name, vjp(dy), values)
    batch = blocked[0].batch
    if any(v.batch is not batch for v in blocked):
        raise ValueError(f"{name}: its blocked arguments belong to different mini-batches")

    def block_of(b: int) -> list[Any]:
        return [v.block(b) if isinstance(v, Blocked) else v for v in values]

    rows: list[np.ndarray] = []
    vjps: list[Any] = []
    for b in range(batch.blocks):
        y, vjp = forward(*block_of(b), **options)
        rows.append(_check_rows(name, y, batch.valid(b)))
        vjps.append(vjp)
    if not rows:  # one image of zeros shows the shape of a result
        zeros = [
            np.zeros((1, *v.image_shape), v.dtype) if isinstance(v, Blocked) else v for v in values
        ]
        with np.errstate(all="ignore"):
            y, _ = forward(*zeros, **options)
        rows = [_check_rows(name, y, 1)[:0]]

    def whole_vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        images = {
            i: [np.empty((0, *v.image_shape), v.dtype)]
            for i, v in enumerate(values)
            if needs[i] and isinstance(v, Blocked)
        }
        sums = {i: Counter(batch.tree) for i in range(len(values)) if needs[i] and i not in images}
        for b in range(batch.blocks):
            arguments = block_of(b)
            cotangents = _check_cotangents(name, vjps[b](dy.block(b)), arguments)
            vjps[b] = None  # `backward` plays a tape back only once
            for i, (d, a) in enumerate(zip(cotangents, arguments, strict=True)):
                if needs[i]:
                    d = np.zeros(np.shape(a), a.dtype) if d is None else np.asarray(d, a.dtype)
                    images[i].append(d) if i in images else sums[i].push(d.copy())
        return tuple(
            from_images(np.concatenate(images[i]), batch)
            if i in images
            else sums[i].partial(np.shape(v), v.dtype)
            if i in sums
            else None
            for i, v in enumerate(values)
        )

    return from_images(np.concatenate(rows), batch), whole_vjp


def refuse_gpu(name: str, *values: Any) -> None:
    """Raise TypeError if a value is on a GPU, because the op `name` has no GPU kernel."""
    for value in values:
        if is_device_array(value.stored_array if isinstance(value, Blocked) else value):
            raise TypeError(
                f"{name}: has no GPU kernel, but its argument is on a GPU: run with --device cpu"
            )


def _check_rows(name: str, y: Any, rows: int) -> np.ndarray:
    """Return y as an array, or raise ValueError unless it has one row per image."""
    if np.ndim(y) == 0 or len(y) != rows:
        raise ValueError(
            f"{name}: expected one result per image, ({rows}, ...), got shape {np.shape(y)}; for "
            "a loss, return one value per image and use dl.mean"
        )
    return np.asarray(y)


def _check_cotangents(name: str, cotangents: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return the cotangents, or raise ValueError if their number or a shape is wrong."""
    if not isinstance(cotangents, (tuple, list)) or len(cotangents) != len(args):
        count = f"{len(cotangents)}" if isinstance(cotangents, (tuple, list)) else "no tuple"
        raise ValueError(
            f"{name}: its vjp must return a tuple of {len(args)} cotangents, one for each "
            f"positional argument; got {count}"
        )
    for i, (d, a) in enumerate(zip(cotangents, args, strict=True)):
        if d is not None and np.shape(d) != np.shape(a):
            raise ValueError(
                f"{name}: cotangent of shape {np.shape(d)} for argument {i} of shape {np.shape(a)}"
            )
    return cotangents
