"""Measure how long this process computes, waits and sums, and store spans for a timeline.

The time of the main thread is always counted under one of five kinds. `Phase` switches to another
kind for the duration of a `with` block. The time of a nested phase does not count for the outer
phase. `seconds` returns the total of each kind. This measurement is always on.

Spans (`core.spans`) are stored only between `store_spans` and `take_spans`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

import numpy as np

from mpidl.core.spans import MAIN as MAIN
from mpidl.core.spans import current_layer as current_layer
from mpidl.core.spans import layer as layer
from mpidl.core.spans import now as now
from mpidl.core.spans import place as place
from mpidl.core.spans import record
from mpidl.core.spans import span as span

KINDS = ("other", "input", "compute", "wait", "sum")
OTHER, INPUT, COMPUTE, WAIT, SUM = range(len(KINDS))

# Tracks beside MAIN, which are the rows of the timeline. Spans on the track SUMS may overlap; on
# the other tracks, spans are nested.
SUMS, GPU, ITERATIONS = "sums", "gpu", "iterations"

SPAN = np.dtype([("start", "<i8"), ("end", "<i8"), ("label", "<u4"), ("size", "<u4")])
BRIEF = 5_000  # in nanoseconds; shorter spans of polling are not stored

_pack = Struct("<qqII").pack_into


class Spans:
    """Memory for a limited number of spans. Any thread may add spans.

    Parameters
    ----------
    capacity : int
        Maximum number of spans.

    Attributes
    ----------
    labels : dict
        {(track, category, name): index}. The field `label` of a span is such an index.
    is_full : bool
        Whether spans were dropped because the memory was full.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.is_full = capacity, False
        self.labels: dict[tuple[str, str, str], int] = {}
        self._memory = bytearray(capacity * SPAN.itemsize)
        self._positions, self._lock = itertools.count(), threading.Lock()

    def add(
        self, track: str, category: str, name: str, start: int, end: int, size: int = 0
    ) -> None:
        """Store a span, unless the memory is full.

        Parameters
        ----------
        track : str
            Row of the timeline: the name of a thread, or a track such as `MAIN`.
        category : str
            Kind of the span, such as "wait".
        name : str
            Name of the span.
        start, end : int
            Times in nanoseconds, from the clock `now`.
        size : int
            Size of a sum in bytes, or number of an iteration.
        """
        label = self.labels.get((track, category, name))
        if label is None:
            with self._lock:
                label = self.labels.setdefault((track, category, name), len(self.labels))
        position = next(self._positions)
        if position < self.capacity:
            _pack(self._memory, position * 24, start, end, label, size)
        else:
            self.is_full = True

    def array(self) -> np.ndarray:
        """Return the spans as an array of dtype `SPAN`, roughly in the order in which they ended.

        No span can be added afterwards.
        """
        count, self.capacity = min(next(self._positions), self.capacity), 0
        spans = np.frombuffer(self._memory, SPAN, count)
        return spans[spans["end"] > 0]  # another thread may be adding a span


class _Clock:
    """The time of the main thread by kind, and the memory for spans while spans are stored."""

    def __init__(self) -> None:
        self.totals, self.kind, self.since = [0] * len(KINDS), OTHER, now()
        self.spans: Spans | None = None
        self.iteration_start = 0

    def switch(self, kind: int) -> int:
        """Count the time under another kind from now on; return the time."""
        time = now()
        self.totals[self.kind] += time - self.since
        self.kind, self.since = kind, time
        return time


_clock = _Clock()


class Phase:
    """Context manager that counts the time of a block under a kind and stores the block as a span.

    Only the main thread, which computes and calls MPI, may use phases.

    Parameters
    ----------
    kind : int
        `INPUT`, `COMPUTE`, `WAIT`, `SUM` or `OTHER`.
    name : str
        Name of the span.
    shortest : int
        Shortest duration to store as a span, in nanoseconds.
    """

    __slots__ = ("_kind", "_name", "_shortest", "_outer", "_start")

    def __init__(self, kind: int, name: str, shortest: int = 0) -> None:
        self._kind, self._name, self._shortest = kind, name, shortest

    def __enter__(self) -> None:
        self._outer = _clock.kind
        self._start = _clock.switch(self._kind)

    def __exit__(self, *_: object) -> None:
        time, spans = _clock.switch(self._outer), _clock.spans
        if spans is not None and time - self._start >= self._shortest:
            spans.add(MAIN, KINDS[self._kind], self._name, self._start, time)


def move(kind: int, nanoseconds: int) -> None:
    """Count some nanoseconds since the last change of kind under another kind."""
    _clock.totals[_clock.kind] -= nanoseconds
    _clock.totals[kind] += nanoseconds


def iteration_ends(number: int | None = None) -> None:
    """Store a span from the last call of this function until now, as iteration `number`.

    Without a number, no span is stored, and the next iteration begins now.
    """
    start, _clock.iteration_start = _clock.iteration_start, now()
    if _clock.spans is not None and number is not None and start:
        end = _clock.iteration_start
        _clock.spans.add(ITERATIONS, "iteration", "iteration", start, end, number)


def spans() -> Spans | None:
    """Return the current Spans, or None if spans are not being stored."""
    return _clock.spans


def store_spans(capacity: int) -> None:
    """Start to store spans. At most `capacity` spans are stored."""
    _clock.spans, _clock.iteration_start = Spans(capacity), 0
    record(_clock.spans)


def take_spans() -> Spans | None:
    """Stop storing spans, and return the stored spans, or None if spans were not being stored."""
    stored, _clock.spans = _clock.spans, None
    record(None)
    return stored


@contextlib.contextmanager
def named_places() -> Iterator[None]:
    """Make `place` return the open spans within the `with` block, even if spans are not stored."""
    if _clock.spans is not None:
        yield
        return
    store_spans(0)
    try:
        yield
    finally:
        take_spans()


class Seconds(NamedTuple):
    """The time of this process by kind, in seconds; see `KINDS`."""

    other: float
    input: float
    compute: float
    wait: float
    sum: float


def seconds() -> Seconds:
    """Return the time of each kind since the start of the process."""
    totals = list(_clock.totals)
    totals[_clock.kind] += now() - _clock.since
    return Seconds(*(total / 1e9 for total in totals))
