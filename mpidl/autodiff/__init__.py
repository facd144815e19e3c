"""Automatic differentiation: the tape of ops, gradients, and numerical checks of vjps."""

from mpidl.autodiff.check import check_vjp
from mpidl.autodiff.grad import is_one_number, value_and_grad
from mpidl.autodiff.tape import Var, WithVjp, backward, op, value_of

__all__ = [
    "Var",
    "WithVjp",
    "backward",
    "check_vjp",
    "is_one_number",
    "op",
    "value_and_grad",
    "value_of",
]
