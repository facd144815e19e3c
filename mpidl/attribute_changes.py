"""Count the changes of objects that determine how a training step is computed.

A recorded training step compares this count before each replay, and compares all objects only if
the count has changed.
"""

from typing import Any

count: int = 0


class CountsChanges:
    """Base class of objects that increment `count` whenever one of their attributes is set."""

    def __setattr__(self, name: str, value: Any) -> None:
        global count
        count += 1
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        global count
        count += 1
        super().__delattr__(name)


class CountingDict(dict):
    """A dict that increments `count` whenever it is changed."""


def _counting(method):
    def change(self, *arguments, **keywords):
        global count
        count += 1
        return method(self, *arguments, **keywords)

    return change


for _name in ("__setitem__", "__delitem__", "__ior__"):
    setattr(CountingDict, _name, _counting(getattr(dict, _name)))
for _name in ("clear", "pop", "popitem", "setdefault", "update"):
    setattr(CountingDict, _name, _counting(getattr(dict, _name)))
