"""Measure on the GPU when each part of a recorded training step runs, for a timeline."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from mpidl import phases


class ProgramTimes:
    """Measures spans of time on a GPU with events, and adds the spans to the timeline.

    A segment that is captured as a graph is one span, because events inside a graph would change
    the graph. In other segments, the launches of each layer are one span.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._spans: phases.Spans | None = None  # the timeline that `_reference` belongs to
        self._reference: tuple[Any, float] = (None, 0.0)  # an event and its time in ns
        self._parts: dict[int, list[tuple[str, Any, Any]]] = {}  # {step: (name, first, last)}

    def begin(self, step: int) -> None:
        """Begin a training step. If a new timeline has begun, match the GPU's and host's clocks."""
        if phases.spans() is not self._spans:
            self._spans, self._parts = phases.spans(), {}
            self.device.synchronize()
            start, event = phases.now(), self.device.mark(timed=True)
            self.device.wait(event)
            self._reference = event, (start + phases.now()) / 2
        self._parts[step] = []

    def play(self, step: int, segment: list[Any], graph: Any) -> None:
        """Start a segment of a training step, with events before and after its parts."""
        if graph is not None:
            self._measure(step, segment_name(segment), graph.launch)
        elif not segment[0].captured:
            for operation in segment:
                operation.play(self.device)
        else:
            for place, group in itertools.groupby(segment, key=lambda operation: operation.place):
                self._measure(step, place or "other", partial(self._play, list(group)))

    def _play(self, operations):
        for operation in operations:
            operation.play(self.device)

    def _measure(self, step, name, start):
        first = self.device.mark(timed=True)
        start()
        self._parts[step].append((name, first, self.device.mark(timed=True)))

    def finish(self, step: int) -> None:
        """Store the spans of a training step that the GPU has completed."""
        parts, spans = self._parts.pop(step, []), phases.spans()
        if spans is None:
            self._spans = None  # release the memory of the timeline
        if spans is None or spans is not self._spans:
            return
        for name, first, last in parts:
            event, time = self._reference
            start = time + 1e6 * self.device.elapsed(event, first)
            end = start + 1e6 * self.device.elapsed(first, last)
            spans.add(phases.GPU, "gpu", name, round(start), round(end))
            # Use a recent event as reference, because CUDA returns the time between events as a
            # float32.
            self._reference = first, start


def segment_name(segment: list[Any]) -> str:
    """Return a name from the first and the last place, such as "forward / conv1 to conv2"."""
    places = [operation.place for operation in segment if operation.place]
    if not places:
        return "other"
    first, last = places[0], places[-1]
    return first if first == last else f"{first} to {last}"
