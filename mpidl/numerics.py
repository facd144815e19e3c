"""The version of mpidl's arithmetic: releases with the same number train the same weights.

docs/numerics.md says when the number increases. The golden hashes of `cli/golden.py` belong to one
number, so a test fails if the arithmetic changes but not the number.
"""

import sys
from typing import TypedDict

VERSION = 1


class Origin(TypedDict):
    """The versions of the arithmetic and of the mpidl that computed weights."""

    numerics: int
    mpidl_version: str


def current() -> Origin:
    """Return the versions of this mpidl, as files record them."""
    return {"numerics": VERSION, "mpidl_version": sys.modules["mpidl"].__version__}


def describe(numerics: int | None, mpidl_version: str | None = None) -> str:
    """Return "numerics 1, mpidl 0.1.0". Older files have no numerics (None) and no version."""
    text = "before numerics 1" if numerics is None else f"numerics {numerics}"
    return text if mpidl_version is None else f"{text}, mpidl {str(mpidl_version):.40}"
