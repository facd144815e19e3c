"""Record at which times the training steps of one rank would communicate with other ranks."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidl import phases
from mpidl.backends.cpu import builds
from mpidl.comm.reducer import BUCKET_BYTES, Reducer, is_on_host
from mpidl.core import fold
from mpidl.core.fold import Partial
from mpidl.errors import UserError
from mpidl.ranks.world import World

if TYPE_CHECKING:
    from mpidl.training.progress import EpochSummary
    from mpidl.training.steps import StepResult
    from mpidl.training.trainer import Trainer

AGREE, SUM, BUCKET, FINISH = "agree", "sum", "bucket", "finish"
BLOCKING = (AGREE, SUM)  # events at which a rank waits for all other ranks


class Event(NamedTuple):
    """A point of a training step at which ranks communicate."""

    # At AGREE, the ranks agree whether to continue. At SUM, the step waits for a sum. At
    # BUCKET, an exchange of gradients starts, and the step continues. At FINISH, the step waits
    # for all buckets.
    kind: str
    # Number of values in a reduction-tree node of the sum, and size of a value in bytes.
    width: int = 0
    itemsize: int = 0
    # "add" for sums, "moments" for merging statistics, or "gather" for gathering values that
    # are not nodes of a reduction tree.
    operation: str = "add"


class TracingWorld(World):
    """A world of one rank that records which exchanges a step would make on several ranks.

    Replays of a recorded step record their exchanges too.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__(comm, threads=None)
        # Time of each event in seconds, from `time.perf_counter`, and the event.
        self.events: list[tuple[float, Event]] = []
        # Whether a step has been recorded, so that later steps are replays.
        self.replays_steps = False
        self._is_nested = False

    def note(self, event: Event) -> None:
        """Record an event with the current time; in each replay, if a step is being recorded."""
        if (recorder := builds.recorder()) is None:
            self.events.append((time.perf_counter(), event))
        else:
            self.replays_steps = True
            recorder.call_python(functools.partial(self.note, event))

    def take_events(self) -> list[tuple[float, Event]]:
        """Return the events since the last call, with their times."""
        events, self.events = self.events, []
        return events

    def gplus(self, value: Any) -> Any:
        if self._is_nested:
            return super().gplus(value)
        for event in _sums_of(value):
            self.note(event)
        self._is_nested = True
        try:
            return super().gplus(value)
        finally:
            self._is_nested = False

    def gop(self, operation: Any, value: Any) -> Any:
        if not self._is_nested:
            self.note(Event(AGREE, 1, 8))
        return super().gop(operation, value)

    def reducer(self) -> Reducer:
        return _TracingReducer(self)


class _TracingReducer(Reducer):
    """A reducer that records into which buckets several ranks would pack the gradients."""

    def __init__(self, world: TracingWorld) -> None:
        super().__init__(world)
        self._note, self._buckets_of_step = world.note, _Buckets(world.note)

    def push(self, name: str, value: Any) -> None:
        if isinstance(value, Partial) and is_on_host(value):
            self._buckets_of_step.push(value)
        super().push(name, value)

    def finish(self) -> dict[str, Any]:
        self._buckets_of_step.send()
        self._note(Event(FINISH))
        return super().finish()


class _Buckets:
    """Records buckets, into which terms are packed as in `comm.reducer.Reducer`."""

    def __init__(self, note):
        self.note, self.key, self.width = note, (0, "add"), 0

    def push(self, value):
        for width, itemsize, operation in _terms_of(value):
            if self.width and self.key != (itemsize, operation):
                self.send()
            self.key = itemsize, operation
            self.width += width
            if self.width * itemsize >= BUCKET_BYTES:
                self.send()

    def send(self):
        if self.width:
            self.note(Event(BUCKET, self.width, *self.key))
        self.width = 0


def _terms_of(value):
    """Yield (width, itemsize, operation) of each term of a Partial."""
    width = int(np.prod(value.shape, dtype=int))
    for term in value.terms:
        operation = "moments" if term.combine is fold.merge_moments else "add"
        yield width, term.dtype.itemsize, operation


def _sums_of(value):
    """Return the events of a call of `World.gplus`.

    Consecutive sums of the same kind are one event.
    """
    values = value.values() if isinstance(value, dict) else value
    values = list(values) if isinstance(value, (dict, list, tuple)) else [value]
    events: list[Event] = []
    for item in values:
        if not isinstance(item, Partial):
            array = np.asarray(item)
            events.append(Event(SUM, array.size, max(array.itemsize, 8), "gather"))
            continue
        for width, itemsize, operation in _terms_of(item):
            last = events[-1] if events else None
            if last is not None and last[2:] == (itemsize, operation):
                width += events.pop().width
            events.append(Event(SUM, width, itemsize, operation))
    return events


class StepTimes(NamedTuple):
    """Times of the measured training steps on one rank."""

    # (steps, segments): seconds of work between consecutive points at which the rank would wait
    # for other ranks. The first segment consists of the end of a step and the start of a step.
    segments: np.ndarray
    events: list[Event]
    # (events,): time of each event in a step, from 0 at the start of the step to 1 at its end.
    places: np.ndarray
    # Mean number of seconds per step that the rank waits for the images of the mini-batch.
    input: float


class StepClock:
    """A hook of `dl.train` that times training steps and then ends the training.

    The hook measures for at least `seconds` and `at_least` steps, and leaves out the first `skip`
    (by default, those that are recorded and checked) and steps of smaller mini-batches. Without a
    world, only times are recorded, because several ranks train together.
    """

    def __init__(
        self,
        batch_size: int,
        seconds: float,
        world: TracingWorld | None = None,
        skip: int = 2,
        at_least: int = 3,
    ) -> None:
        self.world, self.batch_size, self.seconds = world, batch_size, seconds
        self.steps_to_skip, self.at_least = skip, at_least
        self.images = 0
        self.step_start = 0.0
        self.input_before = 0.0
        self.input_seconds: list[float] = []
        self.steps: list[tuple[float, float, list[tuple[float, Event]]]] = []

    def iteration(self, trainer: Trainer, result: StepResult) -> None:
        """Store the size of the mini-batch."""
        self.images = result.info.images

    def step(self, trainer: Trainer) -> None:
        """Store the times of the step that has ended. Stop the training after the last step."""
        now, input_total = time.perf_counter(), phases.seconds().input
        events = [] if self.world is None else self.world.take_events()
        if self.steps_to_skip:
            self.steps_to_skip -= 1
        elif self.images == self.batch_size:
            self.steps.append((self.step_start, now, events))
            self.input_seconds.append(input_total - self.input_before)
        self.step_start, self.input_before = now, input_total
        if len(self.steps) >= self.at_least and now - self.steps[0][0] >= self.seconds:
            trainer.stop()

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        """Leave out the next step, because it waits until the first mini-batch has been read."""
        self.steps_to_skip = max(self.steps_to_skip, 1)

    def mean_seconds(self) -> float:
        """Return the mean duration of a step in seconds."""
        return float(np.mean([end - start for start, end, _ in self.steps]))

    def times(self) -> StepTimes:
        """Return the times of the measured steps.

        Raises UserError if the steps do not all have the same events in the same order.
        """
        events = [event for _, event in self.steps[-1][2]]
        rows, places = [], []
        for start, end, timed_events in self.steps:
            if [event for _, event in timed_events] != events:
                raise UserError(
                    "--predict: expected the same sums in every training step, found different "
                    "sums in some steps"
                )
            points = [moment for moment, event in timed_events if event.kind in BLOCKING]
            # No rank waits between the last sum of a step and the agreement of the next step.
            rows.append([points[0] - start + end - points[-1], *np.diff(points)])
            places.append([(moment - start) / (end - start) for moment, _ in timed_events])
        input_seconds = float(np.mean(self.input_seconds))
        return StepTimes(np.array(rows), events, np.median(places, axis=0), input_seconds)
