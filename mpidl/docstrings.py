"""Sections of docstrings that several public functions share."""

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def with_sections(sections: str) -> Callable[[Function], Function]:
    """Return a decorator that inserts sections into a docstring, before Raises and Notes."""

    def document(function: Function) -> Function:
        text = inspect.cleandoc(function.__doc__ or "")
        later = re.search(r"\n\n(Raises|Notes)\n", text)
        end = later.start() if later else len(text)
        function.__doc__ = f"{text[:end]}\n\n{inspect.cleandoc(sections)}{text[end:]}\n"
        return function

    return document
