"""Reverse-mode differentiation: a tape of ops, played back once.

A value is *blocked* (`Blocked`: per image, on the rank that owns the image's block), *replicated*
(a NumPy array, the same bytes on every rank: learnables, and what is computed from them alone) or a
`Partial` (a sum over the images that is not added up over the ranks yet). Cotangents follow:

    value        its cotangent
    Blocked      Blocked, zero in unused lanes
    Partial      replicated
    replicated   a Partial from a blocked op, replicated from any other; their sum is a Partial

A Partial reaches a learnable as it is and goes to whoever adds it up. Where it meets a replicated
value that was itself computed (a tied weight, a normalized weight), it is folded over all ranks at
that fixed place of the tape before the vjp runs: a vjp is never applied to parts of a sum.
"""

import functools
import itertools
from typing import Any

import numpy as np

from mpidl.blocks import Blocked, from_images
from mpidl.fold import Counter, Partial

_clock = itertools.count()


class Var:
    """A value that remembers the op that made it. Learnables are the ones without parents."""

    __slots__ = ("value", "parents", "vjp", "name", "index")

    def __init__(self, value, parents=(), vjp=None, name=None):
        self.value, self.parents, self.vjp, self.name = value, parents, vjp, name
        self.index = next(_clock)

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)

    def _refuse(self, *_, **__):
        raise TypeError(
            f"{self.name!r} is being differentiated: combine it with dl's ops or with + - * / **, "
            "or write an op of your own with @dl.op"
        )

    __float__ = __bool__ = __len__ = __array__ = __iter__ = mean = sum = _refuse

    def __repr__(self):
        return f"Var({self.name}, {self.value!r})"


def value_of(x):
    """The value of a Var, anything else as it is."""
    return x.value if isinstance(x, Var) else x


def op(forward=None, *, blocks=False):
    """Make an op of `forward(*arrays, **options) -> (y, vjp)`.

    Without `blocks`, forward sees plain arrays: where any argument is blocked it is called once for
    each block, with the block's images as C-ordered (n <= 16, ...) arrays and replicated arguments
    whole, and returns y of shape (n, ...); otherwise it is called once. `vjp(dy)` returns a tuple
    with one cotangent for each positional argument (None where there is nothing to say); those of
    replicated arguments are folded over the blocks. A rank with no block calls forward on one image
    of zeros to learn y's shape.

    With `blocks=True`, forward sees Blocked values, whole shares, and `vjp(dy, needs)` returns
    Partials for replicated arguments; needs[i] says whether argument i wants its cotangent.
    """
    if forward is None:
        return functools.partial(op, blocks=blocks)
    name = forward.__name__

    @functools.wraps(forward)
    def wrapped(*args, **options):
        values = [value_of(a) for a in args]
        y, vjp = (
            forward(*values, **options) if blocks else _by_block(name, forward, values, options)
        )
        if not any(isinstance(a, Var) for a in args):
            return y
        return Var(y, args, vjp, name)

    return wrapped


def _by_block(name, forward, values, options):
    """Run a plain-array op once, or over each block of this rank's share."""
    if any(isinstance(v, Partial) for v in values):
        raise TypeError(
            f"{name}: got a Partial, which is not added up over the ranks yet; only sums and "
            "multiples of it have a meaning before world.gplus(value)"
        )
    refuse_gpu(name, *values)
    values = [v.stored() if isinstance(v, Blocked) else v for v in values]
    blocked = [v for v in values if isinstance(v, Blocked)]
    if not blocked:
        y, vjp = forward(*values, **options)
        return np.asarray(y), lambda dy, needs: _checked(name, vjp(dy), values)
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
    vjps = [vjp for _, vjp in results]

    def vjp(dy, needs):
        columns: list[Any] = []
        for i, v in enumerate(values):
            if not needs[i]:
                columns.append(None)
            elif isinstance(v, Blocked):
                columns.append([np.empty((0, *v.image_shape), v.dtype)])
            else:
                columns.append(Counter(batch.tree))
        for b, block_vjp in enumerate(vjps):
            args = [v.block(b) if isinstance(v, Blocked) else v for v in values]
            for column, v, d in zip(
                columns, values, _checked(name, block_vjp(dy.block(b)), args), strict=True
            ):
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

    return from_images(local, batch), vjp


def refuse_gpu(name, *values):
    """Raise the TypeError of an op that works on NumPy arrays where a value lies on a GPU."""
    for value in values:
        array = value.source if isinstance(value, Blocked) else value
        if hasattr(getattr(array, "x", array), "backend"):  # (of a DeferredInput, its x)
            raise TypeError(
                f"{name}: works on NumPy arrays, and its argument lies on a GPU, for which it has "
                "no kernel: run with --device cpu"
            )


def _empty_result(name, forward, values, options):
    args = [np.zeros((1, *v.image_shape), v.dtype) if isinstance(v, Blocked) else v for v in values]
    with np.errstate(all="ignore"):
        y, _ = forward(*args, **options)
    _check_rows(name, y, 1)
    return np.asarray(y)[:0]


def _check_rows(name, y, rows):
    if np.ndim(y) == 0 or len(y) != rows:
        raise ValueError(
            f"{name}: expected one result per image, ({rows}, ...), got shape {np.shape(y)}; for "
            "a loss, return one value per image and use dl.mean"
        )


def _checked(name, cotangents, args):
    if not isinstance(cotangents, (tuple, list)) or len(cotangents) != len(args):
        found = f"{len(cotangents)}" if isinstance(cotangents, (tuple, list)) else "no tuple"
        raise ValueError(
            f"{name}: its vjp must return a tuple of {len(args)} cotangents, one for each "
            f"positional argument; got {found}"
        )
    for i, (d, a) in enumerate(zip(cotangents, args, strict=True)):
        if d is not None and np.shape(d) != np.shape(a):
            raise ValueError(
                f"{name}: cotangent of shape {np.shape(d)} for argument {i} of shape {np.shape(a)}"
            )
    return cotangents


def _accumulate(a, b):
    """a + b of two cotangents: of blocked ones by the op, which asks their backend."""
    return b + a if isinstance(b, Partial) and not isinstance(a, Partial) else a + b


def _in_type(cotangent, dtype):
    """A cotangent in the type of its value, so that the type does not depend on the path."""
    if isinstance(cotangent, Partial):
        return cotangent.astype(dtype)
    if isinstance(cotangent, Blocked):
        if cotangent.dtype == dtype:
            return cotangent
        return cotangent.like(cotangent.lanes.astype(dtype))
    if hasattr(cotangent, "backend") and cotangent.dtype == dtype:
        return cotangent  # on a GPU
    return np.asarray(cotangent, dtype)


def zeros_like(array):
    """Zeros like an array, where it lies."""
    backend = getattr(array, "backend", None)
    return np.zeros_like(array) if backend is None else backend.zeros_like(array)


def backward(root, seed, *, fold=None, on_ready=None, progress=None):
    """Play the tape back from `root`, whose cotangent is `seed`; returns {leaf Var: gradient}.

    The order is the tape's, backwards: the same on every rank. `on_ready(leaf, gradient)` is called
    as soon as a gradient is final, and takes it over: it is not returned. `progress()` is called
    after each vjp. Saved arrays are freed as they are used, so that a tape can be played once only.
    """
    waiting, stack = {root: 0}, [root]
    while stack:
        for parent in stack.pop().parents:
            if isinstance(parent, Var):
                if parent not in waiting:
                    waiting[parent] = 0
                    stack.append(parent)
                waiting[parent] += 1
    cotangents, gradients = {root: seed}, {}

    def finish(leaf):
        gradient = cotangents.pop(leaf, None)
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
            raise RuntimeError(f"the tape through {node.name!r} was already played back")
        if isinstance(dy, Partial):
            if fold is None:
                raise TypeError(
                    f"the cotangent of {node.name!r} is a sum over all ranks: pass the images as "
                    "an argument of the function, or reduce=world"
                )
            dy = fold(dy)
        needs = tuple(isinstance(p, Var) for p in parents)
        parts = vjp(dy, needs) if dy is not None else (None,) * len(parents)
        node.vjp = node.value = vjp = dy = None
        for parent, part in zip(parents, parts, strict=True):
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


def batch_of(*args):
    """The Batch of the first blocked argument, None where there is none."""
    for a in args:
        value = value_of(a)
        if isinstance(value, Blocked):
            return value.batch
    return None
