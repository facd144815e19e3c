"""Reverse-mode differentiation: ops are recorded on a tape, and `backward` plays the tape back.

There are three kinds of values:

- A *blocked* value (`Blocked`) has one entry per image. Each rank stores the entries of its images
  in blocks of 16. A lane is the slot of one image in a block.
- A *replicated* value is a NumPy array with the same bytes on every rank. Learnables, and values
  computed only from learnables, are replicated.
- A `Partial` holds a sum over the images that is not yet complete: the ranks still have to add up
  their terms.

The cotangent of a value is the gradient of the loss with respect to the value. The kind of a value
determines the kind of its cotangent:

    value        cotangent
    Blocked      Blocked, with zeros in unused lanes
    Partial      replicated
    replicated   a Partial from a blocked op, replicated from any other op

The sum of a Partial and a replicated cotangent is a Partial. If the gradient of a learnable is a
Partial, the caller adds it up over the ranks. A replicated value that an op computed, such as a
tied weight, may also get a Partial as cotangent. In this case all ranks add up the Partial at the
same point of the tape, before they call the op's vjp (vector-Jacobian product). A vjp therefore
always receives complete sums.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
)

import numpy as np

from mpidl.core import phases
from mpidl.core.blocks import Batch, Blocked, from_images
from mpidl.core.deferred import SumOfCotangents
from mpidl.core.device_array import is_device_array
from mpidl.core.fold import Counter, Partial
from mpidl.core.operators import Operators

Needs: TypeAlias = tuple[bool, ...]  # for each positional argument, whether to compute a cotangent

_clock = itertools.count()


class Var(Operators):
    """A value on the tape, with the op that computed it. A Var without parents is a leaf.

    Parameters
    ----------
    value
        A Blocked, a Partial or an array.
    parents
        All positional arguments of the op, including those that are not Vars.
    vjp
        A function vjp(dy, needs) that returns a tuple with one cotangent per parent. None for a
        leaf.
    name
        Name of the op, or of the learnable if the Var is a leaf.
    """

    __slots__ = ("value", "parents", "vjp", "name", "index", "layer")

    def __init__(
        self,
        value: Blocked | Partial | np.ndarray,
        parents: Sequence[object] = (),
        vjp: Callable[[Any, Needs], Sequence[Any]] | None = None,
        name: str | None = None,
    ) -> None:
        self.value, self.parents, self.vjp, self.name = value, parents, vjp, name
        self.index: int = next(_clock)
        self.layer = phases.current_layer()  # the layer that computed the value

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        """Data type of the value's elements."""
        return self.value.dtype

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"{self.name!r} is being differentiated, so only dl's ops and + - * / ** accept it: "
            "write a custom op with @dl.op for other functions"
        )

    __float__ = __bool__ = __len__ = __array__ = __iter__ = mean = sum = _refuse

    if TYPE_CHECKING:  # the types of the operators

        def __add__(self, other: Operand) -> Var: ...
        def __radd__(self, other: Blocked | Partial | float) -> Var: ...
        def __sub__(self, other: Operand) -> Var: ...
        def __rsub__(self, other: Blocked | Partial | float) -> Var: ...
        def __mul__(self, other: Operand) -> Var: ...
        def __rmul__(self, other: Blocked | Partial | float) -> Var: ...
        def __truediv__(self, other: Operand) -> Var: ...
        def __rtruediv__(self, other: Blocked | Partial | float) -> Var: ...
        def __pow__(self, exponent: float) -> Var: ...
        def __neg__(self) -> Var: ...

    def __repr__(self) -> str:
        if self.value is None:
            return f"Var({self.name!r}, played back)"
        kind = type(self.value).__name__
        return f"Var({self.name!r}, {kind} of shape {self.shape}, dtype={self.dtype})"


def value_of(x: Any) -> Any:
    """Return the value of a Var. Return any other object unchanged."""
    return x.value if isinstance(x, Var) else x


Array: TypeAlias = np.ndarray | Var  # a replicated value; a Var is differentiated
Operand: TypeAlias = Array | Blocked | Partial | float
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
        If `blocks` is False, a function of plain arrays. If an argument of the op is blocked, the
        op calls forward once per block. Otherwise it calls forward once. For a block of n <= 16
        images, forward gets C-ordered arrays (n, ...) and the full replicated arguments, and must
        return y of shape (n, ...). On a rank without blocks, the op calls forward with one image of
        zeros to find the shape of y. `vjp(dy)` returns a tuple with one cotangent per positional
        argument, or None for an argument that has no cotangent. Cotangents of replicated arguments
        are added up over the blocks.
    blocks
        If True, forward gets Blocked values that hold all images of the rank. `vjp(dy, needs)`
        must then return Partials for replicated arguments. needs[i] is whether argument i needs a
        cotangent.

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
    results = []
    for b in range(batch.blocks):
        args = [v.block(b) if isinstance(v, Blocked) else v for v in values]
        results.append(forward(*args, **options))
        _check_rows(name, results[-1][0], batch.valid(b))
    if results:
        local = np.concatenate([np.asarray(y) for y, _ in results])
    else:
        local = _empty_result(name, forward, values, options)
    vjps: list[Vjp | None] = [vjp for _, vjp in results]

    def whole_vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        columns: list[Any] = []
        for i, v in enumerate(values):
            if not needs[i]:
                columns.append(None)
            elif isinstance(v, Blocked):
                columns.append([np.empty((0, *v.image_shape), v.dtype)])
            else:
                columns.append(Counter(batch.tree))
        for b, block_vjp in enumerate(vjps):
            assert block_vjp is not None  # `backward` plays a tape back only once
            args = [v.block(b) if isinstance(v, Blocked) else v for v in values]
            cotangents = _check_cotangents(name, block_vjp(dy.block(b)), args)
            for column, v, d in zip(columns, values, cotangents, strict=True):
                if column is None:
                    continue
                if isinstance(v, Blocked):
                    size = (batch.valid(b), *v.image_shape)
                    column.append(np.zeros(size, v.dtype) if d is None else d)
                else:
                    leaf = np.zeros(np.shape(v), v.dtype) if d is None else d
                    column.push(np.array(leaf, v.dtype))
            vjps[b] = None
        return tuple(
            None
            if column is None
            else from_images(np.concatenate(column), batch, v.dtype)
            if isinstance(v, Blocked)
            else column.partial(np.shape(v), v.dtype)
            for column, v in zip(columns, values, strict=True)
        )

    return from_images(local, batch), whole_vjp


def refuse_gpu(name: str, *values: Any) -> None:
    """Raise TypeError if a value is on a GPU, because the op `name` has no GPU kernel."""
    for value in values:
        array = value.source if isinstance(value, Blocked) else value
        if is_device_array(getattr(array, "x", array)):  # a DeferredInput holds its array in x
            raise TypeError(
                f"{name}: has no GPU kernel, but its argument is on a GPU: run with --device cpu"
            )


def _empty_result(
    name: str, forward: Callable[..., WithVjp[Any]], values: list[Any], options: dict[str, Any]
) -> np.ndarray:
    """Call forward with one image of zeros, and return a result of the same shape with 0 images."""
    args = [np.zeros((1, *v.image_shape), v.dtype) if isinstance(v, Blocked) else v for v in values]
    with np.errstate(all="ignore"):
        y, _ = forward(*args, **options)
    _check_rows(name, y, 1)
    return np.asarray(y)[:0]


def _check_rows(name: str, y: Any, rows: int) -> None:
    """Raise ValueError unless y has one row per image."""
    if np.ndim(y) == 0 or len(y) != rows:
        raise ValueError(
            f"{name}: expected one result per image, ({rows}, ...), got shape {np.shape(y)}; for "
            "a loss, return one value per image and use dl.mean"
        )


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


def _accumulate(a: Any, b: Any) -> Any:
    """Add two cotangents; if only one of them is a Partial, the Partial is the left operand.

    Cotangents of blocked values are added up when an op reads them.
    """
    if isinstance(a, Blocked) and isinstance(b, Blocked):
        return SumOfCotangents(a, b)
    return b + a if isinstance(b, Partial) and not isinstance(a, Partial) else a + b


def _in_type(cotangent: Any, dtype: np.dtype) -> Any:
    """Convert a cotangent to the dtype of its value. A vjp may have returned another dtype."""
    if isinstance(cotangent, Partial):
        return cotangent.astype(dtype)
    if isinstance(cotangent, Blocked):
        if cotangent.dtype == dtype:
            return cotangent
        return cotangent.like(cotangent.lanes.astype(dtype))
    if is_device_array(cotangent) and cotangent.dtype == dtype:
        return cotangent  # an array on a GPU
    return np.asarray(cotangent, dtype)


def zeros_like(array: Any) -> Any:
    """Return zeros with the shape and dtype of an array, on the same device."""
    return array.zeros_like() if is_device_array(array) else np.zeros_like(array)


def backward(
    root: Var,
    seed: Any,
    *,
    fold: Callable[[Partial], Any] | None = None,
    on_ready: Callable[[Var, Any], None] | None = None,
    progress: Callable[[], None] | None = None,
) -> dict[Var, Any]:
    """Compute the gradients of `root` by playing the tape back.

    Every rank calls the vjps in the reverse order of the recorded ops. A tape can be played back
    only once, because saved arrays are freed after use.

    Parameters
    ----------
    root
        The value to differentiate.
    seed
        The cotangent of the root.
    fold
        A function that adds up a Partial over all ranks, such as `world.gplus`.
    on_ready
        A function that is called as on_ready(leaf, gradient) as soon as a gradient is final.
    progress
        A function without arguments that is called after each vjp.

    Returns
    -------
    dict
        The gradient of each leaf. The dict is empty if `on_ready` is given.

    Raises
    ------
    RuntimeError
        If the tape was already played back.
    TypeError
        If a Partial must be folded and `fold` is None.
    """
    waiting, stack = {root: 0}, [root]
    while stack:
        for parent in stack.pop().parents:
            if isinstance(parent, Var):
                if parent not in waiting:
                    waiting[parent] = 0
                    stack.append(parent)
                waiting[parent] += 1
    cotangents: dict[Var, Any] = {root: seed}
    gradients: dict[Var, Any] = {}

    def finish(leaf: Var) -> None:
        gradient = cotangents.pop(leaf, None)
        if isinstance(gradient, Blocked):
            gradient = gradient.stored()
        if gradient is None:
            value = leaf.value
            gradient = zeros_like(value.lanes if isinstance(value, Blocked) else value)
            gradient = value.like(gradient) if isinstance(value, Blocked) else gradient
        if on_ready:
            on_ready(leaf, gradient)
        else:
            gradients[leaf] = gradient

    nodes = sorted(waiting, key=lambda v: v.index, reverse=True)
    for node in nodes:
        if not node.parents:
            if node is root:
                finish(node)
            continue
        parents, vjp, dy = node.parents, node.vjp, cotangents.pop(node, None)
        if vjp is None:
            raise RuntimeError(
                f"the tape through {node.name!r} was already played back; record a new one"
            )
        if isinstance(dy, Partial):
            if fold is None:
                raise TypeError(
                    f"the cotangent of {node.name!r} is a sum over all ranks: pass the images as "
                    "an argument of the function, or reduce=world"
                )
            dy = fold(dy)
        needs = tuple(isinstance(p, Var) for p in parents)
        parts: Sequence[Any] | None = (None,) * len(parents)
        if dy is not None:
            with phases.layer(node.layer or node.name or ""):
                parts = vjp(dy, needs)
        nothing: Any = None  # free the memory
        node.vjp = node.value = vjp = dy = nothing
        for parent, part in zip(parents, parts or (), strict=True):
            if not isinstance(parent, Var):
                continue
            if part is not None:
                part = _in_type(part, parent.dtype)
                if parent in cotangents:
                    part = _accumulate(cotangents[parent], part)
                cotangents[parent] = part
            waiting[parent] -= 1
            if waiting[parent] == 0 and not parent.parents:
                finish(parent)
        parts = part = None
        if progress:
            progress()
    return gradients


def batch_of(*args: Any) -> Batch | None:
    """Return the Batch of the first blocked argument, or None if no argument is blocked."""
    for a in args:
        value = value_of(a)
        if isinstance(value, Blocked):
            return value.batch
    return None
