"""Count the changes of objects that determine how a training step is computed.

A recorded training step compares this count before each replay, and compares all objects only if
the count has changed.
"""

from typing import Any

count: int = 0


class CountsChanges:
    """Base class of objects that increment `count` whenever one of their attributes is set.

    Writing to `vars(object)`, or calling `object.__setattr__`, does not change the count.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        global count
        super().__setattr__(name, value)
        count += 1

    def __delattr__(self, name: str) -> None:
        global count
        super().__delattr__(name)
        count += 1


class CountingDict(dict):
    """A dict that increments `count` whenever it is changed."""


def _counting(method):
    def change(self, *arguments, **keywords):
        global count
        result = method(self, *arguments, **keywords)
        count += 1
        return result

    return change


for _name in ("__setitem__", "__delitem__", "__ior__"):
    setattr(CountingDict, _name, _counting(getattr(dict, _name)))
for _name in ("clear", "pop", "popitem", "setdefault", "update"):
    setattr(CountingDict, _name, _counting(getattr(dict, _name)))
