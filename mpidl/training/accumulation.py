"""Compute the gradients of a mini-batch one part at a time, to save memory.

The sums have the same bytes as sums over the whole mini-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mpidl.core.blocks import Blocked
from mpidl.core.fold import Counter, Partial, Tree
from mpidl.core.tape import value_of
from mpidl.data.parts import PartedBatch, parts_of
from mpidl.errors import UserError
from mpidl.losses import LOSSES, label_loss
from mpidl.nn import Network


class PartObjective:
    """A loss function that also returns the sum of each term of the loss, without its factor.

    A factor, such as 1 / (images of the mini-batch), rounds. It must be applied to the sum over all
    parts, as without parts, and not to the sum of each part. `function(net, images, targets)`
    returns a tuple with the loss first.
    """

    def __init__(self, function: Callable[..., tuple[Any, ...]]) -> None:
        self.function = function
        # {images of the mini-batch: the loss without sums}; a replayed step does not call Python
        self._losses: dict[int, Partial] = {}

    def __call__(self, net: Network, images: Blocked, targets: Any) -> tuple[Any, ...]:
        results = self.function(net, images, targets)
        loss = value_of(results[0])
        terms = [replace(term, nodes=[]) for term in loss.terms]
        self._losses[images.batch.total or images.batch.count] = Partial(
            terms, None, loss.shape, loss.dtype
        )
        sums = [replace(term, scale=1.0) for term in loss.terms]
        return *results, *(Partial([term], None, loss.shape, term.dtype) for term in sums)

    def of_minibatch(self, value: tuple[Any, ...], images: int) -> tuple[Any, ...]:
        """Return the results of the function, given the added results of the parts."""
        loss = self._losses[images]
        count = len(value) - len(loss.terms)
        return loss.finish(value[count:]), *value[1:count]


def accumulated(
    gradient: Callable[..., Any],
    objective: PartObjective,
    net: Network,
    images: Blocked,
    targets: Any,
) -> Any:
    """Compute `gradient(net, images, targets)` part by part, and return the result. Collective.

    The gradients and results of the parts are summed in a tree. Each leaf of this tree is a node of
    the tree over the blocks of the mini-batch. Each part starts with the network state that the
    previous part left, so batch normalization computes its statistics separately for each part. The
    network is not changed; the state that is returned is that after the last part.
    """
    assert isinstance(images.batch, PartedBatch)
    count, sums, net = len(images.batch.parts), {}, copy.copy(net)
    tree = Tree(count, ((0, count),), 0)
    for part in parts_of(images, targets):
        value, gradients, net.state = gradient(net, *part)
        results = {i: np.array(number) for i, number in enumerate(value)}
        for name, array in (results | gradients).items():
            sums.setdefault(name, Counter(tree)).push(array)
        del part, gradients  # free the memory for the next part
    totals = {name: counter.values[0] for name, counter in sums.items()}
    value = tuple(totals.pop(i) for i in range(len(value)))
    return objective.of_minibatch(value, images.batch.count), totals, net.state


def check(options: Any, loss: Any, device: Any) -> None:
    """Raise UserError if the options request gradient accumulation that this run cannot perform."""
    if options.accumulate == 1:
        return
    flag, problem = f"--accumulate {options.accumulate}", None
    losses = loss, getattr(loss, "cross_entropy", None)  # `Dice` may include a cross-entropy
    if device is not None:
        problem = "on GPUs, a step is recorded for the whole mini-batch; use --device cpu"
    elif options.sampling == "partition":
        problem = "--sampling partition divides whole mini-batches among the ranks"
    elif any(getattr(part, "class_weights", None) is not None for part in losses):
        problem = "--class-weights divides by a sum over the whole mini-batch"
    elif any(getattr(part, "ignore_label", None) is not None for part in losses):
        problem = "--ignore-label divides by a sum over the whole mini-batch"
    elif loss not in [*LOSSES] and label_loss(loss) is None:  # a loss may have no hash
        name = getattr(loss, "__name__", loss)
        problem = f"expected the loss {', '.join(LOSSES)}, found {name}"
    if problem:
        raise UserError(f"{flag}: {problem}")
