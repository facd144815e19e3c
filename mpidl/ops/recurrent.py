"""Recurrent ops, LSTM and GRU, and their gradients.

The rows of an image are the steps of a sequence. The op `recurrence` computes the products of the
input with its weights by a convolution, for all steps at once, and then the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from mpidl import backends
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Array, Needs, Var, value_of
from mpidl.ops import check
from mpidl.ops.conv import conv2d_geometry
from mpidl.ops.dense import flatten
from mpidl.ops.pad import pad2d

__all__ = ["gru", "lstm"]

Returns: TypeAlias = Literal["sequence", "last"]
X = TypeVar("X", Blocked, Var)


class Kind(NamedTuple):
    """The number of gates of a unit, and the names of the parts of its state."""

    gates: int
    state: tuple[str, ...]


KINDS = {"lstm": Kind(4, ("hidden", "cell")), "gru": Kind(3, ("hidden",))}


def check_returns(name: str, returns: Any) -> None:
    """Raise ValueError unless `returns` is "sequence" or "last"."""
    if returns not in ("sequence", "last"):
        raise ValueError(f"{name}: returns must be 'sequence' or 'last', got {returns!r}")


def check_truncate(name: str, truncate: Any) -> None:
    """Raise ValueError unless `truncate` is None or an integer >= 1."""
    if truncate is not None:
        check.integer(name, "truncate", truncate)


@op(blocks=True)
def recurrence(
    x: Blocked,
    weight: Array,
    bias: Array | None,
    recurrent_weight: Array,
    recurrent_bias: Array | None,
    *state: Blocked,
    kind: str,
    is_reversed: bool,
    truncate: int | None,
    last: list[Blocked],
) -> WithVjp[Blocked]:
    """Compute all steps, and append the final state to `last`.

    x and the result are (N, C, steps, W) and (N, units, steps, 1). A convolution computes the
    products of the input, and `interface.Backend.recurrence` the steps. They are one op, because a
    tape keeps the result of each op, and the products take much memory.
    """
    geometry = conv2d_geometry(x, weight, bias)
    backend, batch, steps = backends.of_value(x), x.batch, x.image_shape[1]
    arguments = recurrent_weight, recurrent_bias, [value.raw for value in state], is_reversed
    products = backend.conv2d(x.source, weight, bias, geometry)
    y, record, final = backend.recurrence(kind, products, *arguments)
    last += [x.like(value) for value in final]

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        counts, tree = batch.counts(), batch.tree
        needs_input, needs_steps = needs[:3], (any(needs[:3]), *needs[3:])
        options = truncate or steps, counts, tree, needs_steps
        dproducts, dweight, dbias, *dstate = backend.recurrence_backward(
            kind, dy.raw, record, *arguments, *options
        )
        of_input: tuple[Any, ...] = None, None, None
        if any(needs_input):
            images = x.source, weight, geometry, counts, tree, needs_input
            dx, *of_filters, _ = backend.conv2d_backward(dproducts, *images)
            of_input = None if dx is None else x.like(dx), *of_filters
        values = zip(state, dstate, strict=True)
        dstate = [None if d is None else value.like(d) for value, d in values]
        return *of_input, dweight, dbias, *dstate

    return x.like(y), vjp


def _check(
    kind: str,
    x: Any,
    weight: Array,
    recurrent_weight: Array,
    bias: Array | None,
    recurrent_bias: Array | None,
    *state: Any,
) -> None:
    """Raise ValueError unless the arguments of `lstm` or `gru` fit together."""
    check.images(kind, x, 4)
    gates, names = KINDS[kind]
    channels, _, columns = x.shape[1:]
    outputs = weight.shape[0] if len(weight.shape) == 4 else 0
    units = outputs // gates
    expected = (gates * units, channels, 1, columns), (gates * units, units, 1, 1)
    shapes = tuple(tuple(v.shape) for v in (weight, recurrent_weight))
    if not units or shapes != expected:
        raise ValueError(
            f"{kind}: expected weight ({gates}*units, {channels}, 1, {columns}) and "
            f"recurrent_weight ({gates}*units, units, 1, 1) for x {x.shape}, got {shapes[0]} and "
            f"{shapes[1]}"
        )
    for vector in (bias, recurrent_bias):
        if vector is not None and tuple(vector.shape) != (outputs,):
            raise ValueError(f"{kind}: expected a bias ({outputs},), got {tuple(vector.shape)}")
    if state and len(state) != len(names):
        raise ValueError(f"{kind}: expected a state {_text_of(names)}, got {len(state)} values")
    for value in state:
        check.images(kind, value, 2)
        if tuple(value.shape) != (x.shape[0], units):
            raise ValueError(
                f"{kind}: expected a state of shape ({x.shape[0]}, {units}), got {value.shape}"
            )
        runs, expected_runs = value.batch.tree.runs, x.batch.tree.runs
        if runs != expected_runs:
            raise ValueError(
                f"{kind}: expected a state divided among the ranks as x is, in blocks "
                f"{expected_runs}, got {runs}"
            )


def _text_of(names: Sequence[str]) -> str:
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"


def _tuple_of(kind: str, state: Any) -> tuple[Any, ...]:
    """Return a state as a tuple, () for None. Raise TypeError for a value outside of a tuple."""
    if state is None or isinstance(state, (tuple, list)):
        return tuple(state or ())
    names = _text_of(KINDS[kind].state)
    raise TypeError(f"{kind}: expected a state {names}, got one {type(state).__name__}")


def _recurrent(
    kind: str,
    x: Any,
    weights: Sequence[Any],
    state: Sequence[Any] | None,
    returns: Returns,
    reverse: bool,
    truncate: int | None,
) -> tuple[Any, tuple[Blocked, ...]]:
    """Compute `lstm` or `gru` with the weights (input, recurrent) and the biases of both."""
    weight, recurrent_weight, bias, recurrent_bias = weights
    state = _tuple_of(kind, state)
    last: list[Blocked] = []
    _check(kind, value_of(x), *map(value_of, weights), *map(value_of, state))
    check_returns(kind, returns)
    check_truncate(kind, truncate)
    y = recurrence(
        x,
        weight,
        bias,
        recurrent_weight,
        recurrent_bias,
        *state,
        kind=kind,
        is_reversed=bool(reverse),
        truncate=truncate,
        last=last,
    )
    if returns == "last":
        removed = 1 - y.shape[2]  # a negative padding removes the rows of the other steps
        y = flatten(pad2d(y, ((0, removed) if reverse else (removed, 0), (0, 0))))
    return y, tuple(last)


def lstm(
    x: X,
    weight: Array,
    recurrent_weight: Array,
    bias: Array | None = None,
    *,
    state: Sequence[Blocked | Var] | None = None,
    returns: Returns = "sequence",
    reverse: bool = False,
    truncate: int | None = None,
) -> tuple[X, tuple[Blocked, ...]]:
    """Compute a long short-term memory (LSTM) over the rows of images.

    A step reads a row of C x W numbers. With the hidden state h and the cell state c, which are 0
    before the first step, each step computes i, f and o = sigmoid(weight x + recurrent_weight h +
    bias) and g = tanh(weight x + recurrent_weight h + bias), each with its own weights, and then
    c = f c + i g and h = o tanh(c).

    Parameters
    ----------
    x
        Images (N, C, H, W): a sequence of H steps for each image. Sequences of F features are
        images (N, F, H, 1) or (N, 1, H, F).
    weight
        Weights of the input, (4U, C, 1, W) for U units, in the order i, f, g, o of the gates.
    recurrent_weight
        Weights of the hidden state, (4U, U, 1, 1).
    bias
        Biases, (4U,), or None.
    state
        The state (h, c) before the first step, (N, U) each, such as the returned state of the
        preceding part of the sequences. By default, zeros.
    returns
        Whether y has the outputs of all steps ("sequence"), or of the last one ("last").
    reverse
        Whether the last row is the first step.
    truncate
        Number of steps of a chunk for truncated backpropagation: the state passes from chunk to
        chunk, and the gradient does not. By default, the gradient passes through all steps.

    Returns
    -------
    y : Blocked
        The hidden states, (N, U, H, 1), or the last one, (N, U); a Var during differentiation.
    state : tuple of Blocked
        The state (h, c) after the last step, (N, U) each. It is not differentiated.

    Raises
    ------
    ValueError
        If the shapes do not fit together, or `returns` or `truncate` is invalid.

    Notes
    -----
    See Hochreiter and Schmidhuber, "Long short-term memory", 1997, with the forget gate of Gers,
    Schmidhuber and Cummins, "Learning to forget", 2000.
    """
    weights = weight, recurrent_weight, bias, None
    return _recurrent("lstm", x, weights, state, returns, reverse, truncate)


def gru(
    x: X,
    weight: Array,
    recurrent_weight: Array,
    bias: Array | None = None,
    recurrent_bias: Array | None = None,
    *,
    state: Sequence[Blocked | Var] | None = None,
    returns: Returns = "sequence",
    reverse: bool = False,
    truncate: int | None = None,
) -> tuple[X, tuple[Blocked, ...]]:
    """Compute a gated recurrent unit (GRU) over the rows of images.

    A step reads a row of C x W numbers. With the hidden state h, which is 0 before the first step,
    p = recurrent_weight h + recurrent_bias, and v = weight x + bias, each with separate weights for
    r, z and n, a step computes r and z = sigmoid(v + p), n = tanh(v + r p), and the new
    h = n + z (h - n).

    Parameters
    ----------
    x
        Images (N, C, H, W): a sequence of H steps for each image. Sequences of F features are
        images (N, F, H, 1) or (N, 1, H, F).
    weight
        Weights of the input, (3U, C, 1, W) for U units, in the order r, z, n.
    recurrent_weight
        Weights of the hidden state, (3U, U, 1, 1).
    bias, recurrent_bias
        Biases of the products of the input and of the hidden state, (3U,), or None.
    state
        The state (h,) before the first step, (N, U), such as the returned state of the preceding
        part of the sequences. By default, zeros.
    returns
        Whether y has the outputs of all steps ("sequence"), or of the last one ("last").
    reverse
        Whether the last row is the first step.
    truncate
        Number of steps of a chunk for truncated backpropagation: the state passes from chunk to
        chunk, and the gradient does not. By default, the gradient passes through all steps.

    Returns
    -------
    y : Blocked
        The hidden states, (N, U, H, 1), or the last one, (N, U); a Var during differentiation.
    state : tuple of Blocked
        The state (h,) after the last step, (N, U). It is not differentiated.

    Raises
    ------
    ValueError
        If the shapes do not fit together, or `returns` or `truncate` is invalid.

    Notes
    -----
    See Cho et al., "Learning phrase representations using RNN encoder-decoder", 2014,
    arXiv:1406.1078. As in PyTorch, r multiplies the product of the hidden state and its weights.
    """
    weights = weight, recurrent_weight, bias, recurrent_bias
    return _recurrent("gru", x, weights, state, returns, reverse, truncate)
