"""Provide losses by name, and adapt user-defined loss functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from mpidl import ops
from mpidl.core.blocks import Blocked
from mpidl.core.grad import is_one_number
from mpidl.errors import UserError
from mpidl.losses.base import LabelLoss, Sums
from mpidl.losses.binary_cross_entropy_loss import BinaryCrossEntropy
from mpidl.losses.cross_entropy_loss import CrossEntropy
from mpidl.losses.overlap_losses import Dice, Tversky

if TYPE_CHECKING:
    from mpidl.nn import Network


def mean_squared_error(net: Network, images: Blocked, targets: Blocked) -> Sums:
    """Return the mean squared error of the outputs, as a tuple of one Partial."""
    return (ops.mean_squared_error(net(images), targets),)


def mean_absolute_error(net: Network, images: Blocked, targets: Blocked) -> Sums:
    """Return the mean absolute error of the outputs, as a tuple of one Partial."""
    return (ops.mean_absolute_error(net(images), targets),)


cross_entropy = CrossEntropy()  # the loss "crossentropy" without options

LossFunction: TypeAlias = Callable[["Network", Any, Any], Sums]

LOSSES: dict[str, LossFunction] = {
    "crossentropy": cross_entropy,
    "binary-crossentropy": BinaryCrossEntropy(),
    "dice": Dice(),
    "crossentropy+dice": Dice(cross_entropy=cross_entropy),
    "tversky": Tversky(),
    "mse": mean_squared_error,
    "mae": mean_absolute_error,
}


def label_loss(loss: str | Callable[..., Any]) -> LabelLoss | None:
    """Return the label loss that `loss` names or is, or None if `loss` is not a label loss."""
    value = loss if callable(loss) else LOSSES.get(loss)
    return value if isinstance(value, LabelLoss) else None


def has_class_scores(loss: str | Callable[..., Any]) -> bool:
    """Return whether the outputs for this loss are class scores, and each label is one class."""
    named_loss = label_loss(loss)
    return named_loss is not None and not named_loss.separate_labels


def has_label_scores(loss: str | Callable[..., Any]) -> bool:
    """Return whether the outputs for this loss are scores of labels that may occur together."""
    named_loss = label_loss(loss)
    return named_loss is not None and named_loss.separate_labels


def loss_with_options(name: str | Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return a named loss with options {name: value} that differ from the defaults, or
    the name itself if there are none. Raises UserError if the loss does not have one of the
    options, or if a value is out of range.
    """
    for option, value in options.items():
        takers = [other for other, loss in LOSSES.items() if hasattr(_with_options(loss), option)]
        if callable(name) or name not in takers:
            *losses, last = takers
            expected = f"{', '.join(losses)} or {last}" if losses else last
            raise UserError(
                f"--{option.replace('_', '-')} {value}: expected the loss {expected}, found {name}"
            )
    if callable(name) or not options:
        return name
    loss: Any = LOSSES[name]
    changed = replace(_with_options(loss), **options)
    if isinstance(changed, type(loss)):
        return changed
    return replace(loss, ignore_label=changed.ignore_label, cross_entropy=changed)


def _with_options(loss: Any) -> Any:
    """Return the loss whose fields are the options: the cross-entropy, if a Dice loss is added."""
    return getattr(loss, "cross_entropy", None) or loss


def loss_function(loss: str | Callable[..., Any]) -> LossFunction:
    """Return a loss as a function f(net, images, targets) of Partials: the loss to minimize and,
    optionally, the number of correct labels. A label loss may return more sums (see
    `LabelLoss.of_scores`). `loss` is a name in LOSSES, or a function that returns a loss or that
    tuple. Raises UserError if no loss has this name. The returned function raises TypeError if the
    user's function returns something else.
    """
    if not callable(loss):
        if loss not in LOSSES:
            raise UserError(f"loss must be {', '.join(LOSSES)} or a function, found {loss}")
        return LOSSES[loss]
    if isinstance(loss, LabelLoss):
        return loss
    name = getattr(loss, "__name__", loss)

    def checked_loss(net, images, targets):
        sums = loss(net, images, targets)
        sums = sums if isinstance(sums, tuple) else (sums,)
        if len(sums) not in (1, 2) or not all(map(is_one_number, sums)):
            raise TypeError(
                f"{name}: expected a loss, or (loss, number of correct labels), each a single "
                f"number, got {sums[0] if len(sums) == 1 else sums!r}"
            )
        return sums

    return checked_loss
