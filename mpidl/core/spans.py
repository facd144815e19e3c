"""Name the parts of a training step while they run, for timelines and for messages.

A span is a named interval of time on the main thread. Spans cost nothing unless they are recorded:
`phases` measures time, and records the spans.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter_ns as now
from typing import Protocol

MAIN = "main"  # the track of the main thread in a timeline


class Recorder(Protocol):
    """Interface of an object that stores spans; times are in nanoseconds, from the clock `now`."""

    def add(self, track: str, category: str, name: str, start: int, end: int) -> None: ...


class _State:
    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.layer: str | None = None  # the innermost open layer
        self.open: list[str] = []  # the names of the open spans


_state, _no_span = _State(), contextlib.nullcontext()


@contextlib.contextmanager
def _recorded(category: str, name: str) -> Iterator[None]:
    start, outer = now(), _state.layer
    _state.open.append(name)
    _state.layer = name if category == "layer" else outer
    try:
        yield
    finally:
        _state.layer = outer
        if _state.recorder is not None:
            if _state.open:  # empty if the span began before `record`
                _state.open.pop()
            _state.recorder.add(MAIN, category, name, start, now())


def span(name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that records a block as a span."""
    return _no_span if _state.recorder is None else _recorded("span", name)


def layer(name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager like `span`, for the work of a layer."""
    return _no_span if _state.recorder is None else _recorded("layer", name)


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
