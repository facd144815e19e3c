"""Compute the value and the gradients of a function of a network or a dict of arrays."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, overload

import numpy as np

from mpidl.core import spans
from mpidl.core.fold import Partial, replicated
from mpidl.core.tape import Var, backward, batch_of, value_of
from mpidl.core.values import zeros_like


class Reducing(Protocol):
    """Interface of a world, such as `mpidl.World`, that sums gradients for `value_and_grad`."""

    def gplus(self, value: Any) -> Any:
        """Add up Partials over the ranks."""

    def reducer(self) -> Any:
        """Return an object that exchanges gradients during the backward pass."""


class Bindable(Protocol):
    """Interface of a network, such as `mpidl.Network`, for `value_and_grad`."""

    @property
    def trainable(self) -> Mapping[str, np.ndarray]:
        """The learnables to differentiate, by name."""

    def bind(self, learnables: Mapping[str, Any]) -> Any:
        """Return a copy of the network in training mode with these learnables."""


Loss: TypeAlias = Partial | Var | np.ndarray | float
Outputs = TypeVar("Outputs", bound=tuple[Any, ...])  # (loss, *others)
Arguments = ParamSpec("Arguments")
Result_co = TypeVar("Result_co", covariant=True)
Gradient = TypeVar("Gradient", Partial, np.ndarray)


class ValueAndGrad(Protocol[Arguments, Result_co, Gradient]):
    """The function that `value_and_grad` returns."""

    @overload
    def __call__(
        self, model: Bindable, /, *args: Arguments.args, **options: Arguments.kwargs
    ) -> tuple[Result_co, dict[str, Gradient], dict[str, np.ndarray]]: ...
    @overload
    def __call__(
        self,
        model: Mapping[str, np.ndarray],
        /,
        *args: Arguments.args,
        **options: Arguments.kwargs,
    ) -> tuple[Result_co, dict[str, Gradient]]: ...


@overload
def value_and_grad(
    f: Callable[Concatenate[Any, Arguments], Loss], *, reduce: None = None
) -> ValueAndGrad[Arguments, Partial, Partial]: ...
@overload
def value_and_grad(
    f: Callable[Concatenate[Any, Arguments], Outputs], *, reduce: None = None
) -> ValueAndGrad[Arguments, Outputs, Partial]: ...
@overload
def value_and_grad(
    f: Callable[Concatenate[Any, Arguments], Loss], *, reduce: Reducing
) -> ValueAndGrad[Arguments, np.ndarray, np.ndarray]: ...
@overload
def value_and_grad(
    f: Callable[Concatenate[Any, Arguments], Outputs], *, reduce: Reducing
) -> ValueAndGrad[Arguments, tuple[np.ndarray, ...], np.ndarray]: ...
def value_and_grad(f: Callable[..., Any], *, reduce: Reducing | None = None) -> Any:
    """Return a function that computes the value of `f` and its gradients.

    Parameters
    ----------
    f
        A function f(model, *args, **options) that returns a scalar loss or a tuple (loss, *others).
        It receives a copy of the model (of a network, in training mode) whose learnables are Vars.
    reduce
        A `World` that adds up the gradients over the ranks during the backward pass, and then the
        results. By default, the results and gradients are Partials, for `world.gplus`; the ranks
        exchange only the sums that ops need, such as the moments of batch normalization.

    Returns
    -------
    callable
        A function of (model, *args, **options). For a dict of arrays, it returns (value,
        gradients); for a Network, (value, gradients, state) with the new state of the network.
        `gradients` is a dict by the names in the dict, or in `Network.trainable`.

    Raises
    ------
    TypeError
        Raised by the returned function if the loss is not a single number.
    """

    def run(model: Any, *args: Any, **options: Any) -> Any:
        network = hasattr(model, "bind")
        with spans.span("forward"):
            learnables = model.trainable if network else model
            leaves = {name: Var(value, name=name) for name, value in learnables.items()}
            traced: Any = model.bind(leaves) if network else leaves
            result = f(traced, *args, **options)
        outputs = result if isinstance(result, tuple) else (result,)
        loss, value = outputs[0], [value_of(v) for v in outputs]
        if not is_one_number(loss):
            raise TypeError(
                f"a loss must be a single number, got {value[0]!r}; dl.mean reduces one value "
                "per image, (N,), to a number"
            )
        batch = batch_of(*args)
        world = batch.world if batch else reduce
        computed = {}
        with spans.span("backward"):
            reducer = reduce.reducer() if reduce is not None else None
            if isinstance(loss, Var):
                computed = backward(
                    loss,
                    np.ones((), value[0].dtype),
                    fold=world.gplus if world is not None else None,
                    on_ready=(lambda leaf, g: reducer.push(leaf.name, g)) if reducer else None,
                    progress=reducer.progress if reducer else None,
                )
        with spans.span("sums of gradients"):
            if reducer:
                sums = reducer.finish().items()
                computed = {leaves[name]: g for name, g in sums if name in leaves}
            gradients = {
                name: computed[leaf] if leaf in computed else zeros_like(leaf.value)
                for name, leaf in leaves.items()
            }
        if reduce is not None:
            partials = {i: v for i, v in enumerate(value) if isinstance(v, Partial)}
            with spans.span("sum of the loss"):
                totals = reduce.gplus(partials)
            value = [totals.get(i, v) for i, v in enumerate(value)]
        else:
            value[0] = _as_partial(value[0])
            gradients = {name: _as_partial(g) for name, g in gradients.items()}
        returned = tuple(value) if isinstance(result, tuple) else value[0]
        return (returned, gradients, traced.state) if network else (returned, gradients)

    return run


def _as_partial(value: Any) -> Partial:
    return value if isinstance(value, Partial) else replicated(value)


def is_one_number(value: Any) -> bool:
    """Return whether a value is a single number: a Partial or array of shape (), or a number."""
    value = value_of(value)
    return isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()
