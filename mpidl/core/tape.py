"""Reverse-mode differentiation: ops are recorded on a tape, and `backward` plays the tape back.

The gradient of the loss with respect to a value is the cotangent of the value:

    value                                                   its cotangent
    Blocked: an entry per image, on the rank of the image   Blocked, with zeros in unused lanes
    Partial: a sum that the ranks have yet to complete      replicated
    replicated: the same bytes on all ranks                 a Partial from a blocked op, otherwise
                                                            replicated

The caller adds up the Partial of a learnable over the ranks. A replicated value that an op
computed, such as a tied weight, may also get a Partial: then all ranks add it up at the same point
of the tape, before they call the op's vjp (vector-Jacobian product). A vjp never receives parts of
a sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from mpidl.core import spans
from mpidl.core.blocks import Batch, Blocked
from mpidl.core.fold import Partial
from mpidl.core.values import Operators, as_type, is_device_array, zeros_like

Needs: TypeAlias = tuple[bool, ...]  # for each positional argument, whether to compute a cotangent

_clock = itertools.count()


class Var(Operators["Operand"]):
    """A value on the tape, with the op that computed it. A Var without parents is a leaf.

    Parameters
    ----------
    value
        A Blocked, a Partial or an array.
    parents
        All positional arguments of the op, including those that are not Vars.
    vjp
        A function vjp(dy, needs) that returns one cotangent per parent; None for a leaf.
    name
        Name of the op, or of the learnable of a leaf.
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
        self.layer = spans.current_layer()  # the layer that computed the value

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


def batch_of(*args: Any) -> Batch | None:
    """Return the Batch of the first blocked argument, or None if no argument is blocked."""
    for a in args:
        value = value_of(a)
        if isinstance(value, Blocked):
            return value.batch
    return None


def backward(
    root: Var,
    seed: Any,
    *,
    fold: Callable[[Partial], Any] | None = None,
    on_ready: Callable[[Var, Any], None] | None = None,
    progress: Callable[[], None] | None = None,
) -> dict[Var, Any]:
    """Return the gradient of each leaf of `root`, by playing the tape back; see `Var`.

    All ranks call the vjps in the reverse order of the ops. `seed` is the cotangent of the root,
    and `fold` adds up a Partial over all ranks, such as `world.gplus`. If `on_ready` is given, it
    is called with each leaf and its gradient as soon as the gradient is final, and the result is
    empty. `progress` is called after each vjp. A tape plays only once, because saved arrays are
    freed after use.
    """
    waiting = _count_uses(root)
    cotangents: dict[Var, Any] = {root: seed}
    gradients: dict[Var, Any] = {}

    def finish(leaf: Var) -> None:
        gradient = _gradient_of(leaf, cotangents.pop(leaf, None))
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
            with spans.layer(node.layer or node.name or ""):
                parts = vjp(dy, needs)
        nothing: Any = None  # free the memory
        node.vjp = node.value = vjp = dy = nothing
        for parent, part in zip(parents, parts or (), strict=True):
            if not isinstance(parent, Var):
                continue
            if part is not None:
                part = _in_type(part, parent.value)
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


def _count_uses(root: Var) -> dict[Var, int]:
    """Return how often each Var of the tape is an argument of an op."""
    uses, stack = {root: 0}, [root]
    while stack:
        for parent in stack.pop().parents:
            if isinstance(parent, Var):
                if parent not in uses:
                    uses[parent] = 0
                    stack.append(parent)
                uses[parent] += 1
    return uses


def _gradient_of(leaf: Var, cotangent: Any) -> Any:
    """Return the final gradient of a leaf; zeros if the root does not depend on it."""
    if isinstance(cotangent, Blocked):
        return cotangent.stored()
    if cotangent is not None:
        return cotangent
    if isinstance(leaf.value, Blocked):
        return leaf.value.like(zeros_like(leaf.value.raw))
    return zeros_like(leaf.value)


def _accumulate(a: Any, b: Any) -> Any:
    """Add two cotangents; if only one of them is a Partial, the Partial is the left operand.

    Cotangents of blocked values are added up when an op reads them.
    """
    if isinstance(a, Blocked) and isinstance(b, Blocked):
        return SumOfCotangents(a, b)
    return b + a if isinstance(b, Partial) and not isinstance(a, Partial) else a + b


def _in_type(cotangent: Any, value: Any) -> Any:
    """Convert a cotangent to the dtype of its value. A vjp may have returned another dtype."""
    dtype = value.storage if isinstance(value, Blocked) else value.dtype
    if isinstance(cotangent, Partial):
        return cotangent.astype(dtype)
    if isinstance(cotangent, Blocked):
        if cotangent.storage == dtype:
            return cotangent
        return cotangent.like(as_type(cotangent.raw, dtype))
    if is_device_array(cotangent) and cotangent.dtype == dtype:
        return cotangent  # an array on a GPU
    return np.asarray(cotangent, dtype)


class SumOfCotangents(Blocked):
    """The sum of two cotangents, in order, which an op may add up while it reads `parts`.

    Otherwise `raw` computes the sum at the first access, and drops the two.
    """

    __slots__ = ("parts",)

    def __init__(self, first: Blocked, second: Blocked) -> None:
        self.parts: tuple[Blocked, ...] = (first, second)
        self.batch = first.batch

    @property
    def stored_array(self) -> np.ndarray:
        return self.parts[0].stored_array

    @property
    def raw(self) -> np.ndarray:
        if len(self.parts) == 2:
            first, second = self.parts
            self.parts = (first + second,)
        return self.parts[0].raw

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.parts[0].image_shape

    def stored(self) -> Blocked:
        return self.like(self.raw)
