"""Name the parts of a training step while they run, for timelines and for messages.

A span is a named interval of time on the main thread. Spans cost nothing unless they are recorded:
`phases` measures time, and records the spans.
"""

from __future__ import annotations

import contextlib
from time import perf_counter_ns as now
from typing import ClassVar, Protocol

MAIN = "main"  # the track of the main thread in a timeline


class Recorder(Protocol):
    """Interface of an object that stores spans; times are in nanoseconds, from the clock `now`."""

    def add(self, track: str, category: str, name: str, start: int, end: int) -> None: ...


class _State:
    """The recorder, and the innermost open layer; `open` has the names of the open spans."""

    recorder: Recorder | None = None
    layer: str | None = None
    open: ClassVar[list[str]] = []


class _Span:
    """Context manager that records a block as a span."""

    __slots__ = ("_category", "_name", "_outer", "_start")

    def __init__(self, category: str, name: str) -> None:
        self._category, self._name = category, name

    def __enter__(self) -> None:
        self._start = now()
        _state.open.append(self._name)
        self._outer = _state.layer
        if self._category == "layer":
            _state.layer = self._name

    def __exit__(self, *_: object) -> None:
        _state.layer = self._outer
        if _state.recorder is not None:
            if _state.open:  # empty if the span began before `record`
                _state.open.pop()
            _state.recorder.add(MAIN, self._category, self._name, self._start, now())


_state, _no_span = _State(), contextlib.nullcontext()


def span(name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that records a block as a span."""
    return _no_span if _state.recorder is None else _Span("span", name)


def layer(name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager like `span`, for the work of a layer."""
    return _no_span if _state.recorder is None else _Span("layer", name)


def current_layer() -> str | None:
    """Return the name of the innermost open `layer`, or None."""
    return _state.layer


def place() -> str:
    """Return the names of the open spans, such as "backward / conv2", or "" if none is open."""
    return " / ".join(_state.open)


def record(recorder: Recorder | None) -> None:
    """Record spans with another recorder from now on, or no spans."""
    _state.recorder, _state.layer = recorder, None
    _state.open.clear()
