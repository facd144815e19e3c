"""Values and gradients of a function of a network or of a dict of arrays."""

import numbers
from typing import Any

import numpy as np

from mpidl.autodiff.tape import Var, backward, batch_of, value_of, zeros_like
from mpidl.fold import Partial, replicated


def _as_partial(value):
    return value if isinstance(value, Partial) else replicated(value)


def value_and_grad(f, *, reduce=None):
    """`value_and_grad(f)(model, *args)` -> f's value, gradients (and the new state of a network).

    model: a dict of named arrays, or a Network; f gets it with the learnables being differentiated
    and returns a scalar loss, or a tuple (loss, *others) whose others are not differentiated.
    Returns (value, gradients) for a dict, (value, gradients, state) for a Network; gradients is a
    dict by name, without the learnables that are not trained (`Network.trainable`).

    Without `reduce`, the loss and the gradients come back as Partials, for `world.gplus`: nothing
    but batch-norm sums was exchanged. With `reduce=world` they are exchanged while backward runs
    and come back added up.
    """

    def run(model, *args, **options):
        network = hasattr(model, "bind")
        learnables = model.trainable if network else model
        leaves = {name: Var(value, name=name) for name, value in learnables.items()}
        traced: Any = model.bind(leaves) if network else leaves
        result = f(traced, *args, **options)
        loss, *others = result if isinstance(result, tuple) else (result,)
        value = [value_of(v) for v in (loss, *others)]
        if not is_one_number(loss):
            raise TypeError(
                f"a loss must be one number, got {value[0]!r}; dl.mean makes one of a value per "
                "image, (N,)"
            )
        batch = batch_of(*args)
        world = batch.world if batch else reduce
        reducer = reduce.reducer() if reduce is not None else None
        found = {}
        if isinstance(loss, Var):
            found = backward(
                loss,
                np.ones((), value[0].dtype),
                fold=world.gplus if world is not None else None,
                on_ready=(lambda leaf, g: reducer.push(leaf.name, g)) if reducer else None,
                progress=reducer.progress if reducer else None,
            )
        if reducer:
            found = {leaves.get(name): g for name, g in reducer.finish().items()}
        gradients = {
            name: found[leaf] if leaf in found else zeros_like(leaf.value)
            for name, leaf in leaves.items()
        }
        if reducer:
            partials = {i: v for i, v in enumerate(value) if isinstance(v, Partial)}
            for i, v in reduce.gplus(partials).items():
                value[i] = v
        else:
            value[0] = _as_partial(value[0])
            gradients = {name: _as_partial(g) for name, g in gradients.items()}
        value = tuple(value) if isinstance(result, tuple) else value[0]
        return (value, gradients, traced.state) if network else (value, gradients)

    return run


def is_one_number(value):
    """Whether a loss may be this: a Partial of shape (), or a number."""
    value = value_of(value)
    return isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()
