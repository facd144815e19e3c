"""The type of functions that call ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

from mpidl.core.op import Op

X = TypeVar("X")
Y = TypeVar("Y")
Options = ParamSpec("Options")


def composed(function: Callable[Concatenate[X, Options], Y]) -> Op[X, Options, Y]:
    """Return the function unchanged. For type checkers, it is an op: a Var gives a Var."""
    return cast(Op[X, Options, Y], function)
