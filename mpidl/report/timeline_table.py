"""Summarize a timeline: the time of each rank, the slowest rank and the longest wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidl import phases
from mpidl.phases import Seconds
from mpidl.report.trace_file import RankSpans
from mpidl.text import aligned

STEP = "training step"  # the span around forward, backward and update


class Wait(NamedTuple):
    """A wait of a rank for other ranks."""

    rank: int
    seconds: float
    iteration: int
    operation: str  # the operation that the rank waited for, and the names of the enclosing spans
    place: str
    # The rank that began the same operation last. None if this is the waiting rank itself, or
    # if other ranks do not wait in this operation.
    last_rank: int | None


def slowest_rank(ranks: Sequence[RankSpans]) -> int:
    """Return the rank that spent the most time not waiting for other ranks."""
    return max(range(len(ranks)), key=lambda rank: _own_seconds(ranks[rank].seconds))


def _own_seconds(seconds: Seconds) -> float:
    return sum(seconds) - seconds.wait


def coverage(rank: RankSpans) -> float:
    """Return the fraction of the iterations' time that the spans of the main thread cover.

    The span around the whole training step does not count; forward, backward, update and the other
    spans within the step count.
    """
    iterations, spans = rank.select(phases.ITERATIONS), rank.select(phases.MAIN)
    steps = [number for number, (_, _, name) in enumerate(rank.labels) if name == STEP]
    spans = spans[~np.isin(spans["label"], steps)]
    if not len(iterations) or not len(spans):
        return 0.0
    # Points of the function "nanoseconds covered before time t", which is linear between them.
    ends = np.maximum.accumulate(spans["end"])
    previous_ends = np.concatenate([spans["start"][:1], ends[:-1]])
    starts = np.maximum(spans["start"], previous_ends)
    is_new = ends > previous_ends
    starts, ends = starts[is_new], ends[is_new]
    total = np.cumsum(ends - starts)
    times = np.stack([starts, ends], axis=1).reshape(-1) - starts[0]
    covered = np.stack([total - (ends - starts), total], axis=1).reshape(-1)
    first, last = (
        np.interp(iterations[edge] - starts[0], times, covered) for edge in ("start", "end")
    )
    return float((last - first).sum() / (iterations["end"] - iterations["start"]).sum())


def largest_wait(ranks: Sequence[RankSpans]) -> Wait | None:
    """Return the longest wait for other ranks within an iteration, or None if there is none.

    If there are several iterations, the first one is ignored, because it includes warm-up.
    """
    longest: list[tuple[int, int, int, np.void]] = []  # duration, rank, iteration and wait
    for number, rank in enumerate(ranks):
        waits, iterations = rank.select(phases.MAIN, "wait"), rank.select(phases.ITERATIONS)
        first = iterations["size"][0] if len(iterations) > 1 else 0
        in_iteration = _iteration_of(waits, iterations)
        waits, in_iteration = waits[in_iteration > first], in_iteration[in_iteration > first]
        if len(waits):
            durations = waits["end"] - waits["start"]
            i = int(np.argmax(durations))
            longest.append((int(durations[i]), number, int(in_iteration[i]), waits[i]))
    if not longest:
        return None
    duration, number, iteration, wait = max(longest, key=lambda candidate: candidate[0])
    operation, place = ranks[number].name(wait), _place(ranks[number], wait)
    last_rank = _last_rank(ranks, number, wait)
    return Wait(number, duration / 1e9, iteration, operation, place, last_rank)


def _iteration_of(spans, iterations):
    """Return the number of the iteration in which each span begins; 0 outside of iterations."""
    if not len(iterations):
        return np.zeros(len(spans), np.int64)
    positions = np.searchsorted(iterations["start"], spans["start"], side="right") - 1
    inside = (positions >= 0) & (spans["start"] < iterations["end"][positions])
    return np.where(inside, iterations["size"][positions], 0)


def _place(rank, wait):
    """Return the names of the spans around a wait, such as "backward / conv2"."""
    spans = rank.select(phases.MAIN, "span", "layer")
    around = (spans["start"] <= wait["start"]) & (spans["end"] >= wait["end"])
    around = spans[around]
    order = np.lexsort((-around["end"], around["start"]))
    return " / ".join(rank.name(span) for span in around[order])


def _last_rank(ranks, number, wait):
    """Return the rank that began an operation last, or None; see `Wait`."""
    operation, key, starts = ranks[number].name(wait), None, {}
    for other in (number, *(rank for rank in range(len(ranks)) if rank != number)):
        rank = ranks[other]
        waits = rank.select(phases.MAIN, "wait")
        labels = [i for i, label in enumerate(rank.labels) if label[2] == operation]
        waits = waits[np.isin(waits["label"], labels)]
        in_iteration = _iteration_of(waits, rank.select(phases.ITERATIONS))
        if key is None:  # the iteration, and the number of the operation within it
            position = int(np.nonzero(waits["start"] == wait["start"])[0][0])
            iteration = in_iteration[position]
            key = iteration, position - int(np.nonzero(in_iteration == iteration)[0][0])
        iteration, ordinal = key
        candidates = waits[in_iteration == iteration]
        if ordinal >= len(candidates):
            return None
        starts[other] = int(candidates["start"][ordinal])
    last = max(starts, key=lambda rank: starts[rank])
    return last if starts[last] > starts[number] else None


def summary(ranks: Sequence[RankSpans]) -> list[str]:
    """Return the lines of the table, and lines about the slowest rank and the longest wait.

    The table has the milliseconds per iteration of each rank.
    """
    count = max(ranks[0].iterations, 1)
    names = ("input", "compute", "wait", "sum", "other")
    rows = [["rank", "host", *names, "own work"]]
    for number, rank in enumerate(ranks):
        seconds = [getattr(rank.seconds, name) for name in names]
        values = [1000 * value / count for value in (*seconds, _own_seconds(rank.seconds))]
        rows.append([str(number), rank.host, *(f"{value:.2f}" for value in values)])
    iterations = f"{count} iteration{'s' if count != 1 else ''}"
    lines = [f"Timeline of {iterations}, milliseconds per iteration:", *aligned(rows, left=2)]
    if len(ranks) == 1:
        return lines
    slowest = slowest_rank(ranks)
    work = [_own_seconds(rank.seconds) for rank in ranks]
    excess = 100 * (work[slowest] / max(sum(work) / len(work), 1e-9) - 1)
    lines.append(
        f"Slowest rank: {slowest} on {ranks[slowest].host}, with {excess:.0f} % more work than "
        "the mean"
    )
    if (wait := largest_wait(ranks)) is not None:
        place = f"{wait.operation} in {wait.place}" if wait.place else wait.operation
        last = "" if wait.last_rank is None else f"; rank {wait.last_rank} came last"
        lines.append(
            f"Largest wait: {1000 * wait.seconds:.2f} ms on rank {wait.rank} in iteration "
            f"{wait.iteration}, for {place}{last}"
        )
    return lines
