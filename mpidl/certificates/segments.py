"""Choose the segments of a run that an audit replays."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpidl.certificates.certificate import Certificate
from mpidl.certificates.chain import STATE
from mpidl.core import keyed
from mpidl.errors import UserError
from mpidl.options.declaration import Rule, at_least, check_value

Segment = tuple[int, int]  # its first and last iteration, which are states
Learnables = Mapping[str, np.ndarray]

STEPS = re.compile(r"([0-9]{1,15}):([0-9]{1,15})")
SEED = Rule(int, "between 0 and 2**63 - 1", 0, 2**63 - 1)
COUNT = at_least(1, optional=True)


class Selection(NamedTuple):
    """The iterations to replay: all by default.

    Attributes
    ----------
    steps : (int, int) or None
        First and last iteration.
    sample : int or None
        Number of segments to draw by `seed`.
    seed : int or None
        The seed; by default a new one.
    largest : int or None
        Number of segments in which the weights moved farthest.
    """

    steps: Segment | None = None
    sample: int | None = None
    seed: int | None = None
    largest: int | None = None

    @classmethod
    def of_arguments(
        cls,
        steps: str | Sequence[int] | None = None,
        sample: int | None = None,
        seed: int | None = None,
        largest: int | None = None,
    ) -> Selection:
        """Check the arguments of `audit`, and return the selection."""
        pair = None
        if steps is not None:
            match = STEPS.fullmatch(steps if isinstance(steps, str) else ":".join(map(str, steps)))
            pair = (int(match[1]), int(match[2])) if match else (1, 0)
            if pair[0] > pair[1]:
                raise UserError(f"--steps must be A:B with A <= B, such as 400:450, found {steps}")
        sample = check_value(COUNT, sample, "--sample")
        largest = check_value(COUNT, largest, "--largest")
        seed = check_value(SEED._replace(optional=True), seed, "--seed")
        for name, value in (("sample", sample), ("largest", largest)):
            if pair is not None and value is not None:
                raise UserError(f"--steps and --{name}: expected at most one of them")
        if seed is not None and sample is None:
            raise UserError(f"--seed {seed}: expected --sample with it")
        return cls(pair, sample, seed, largest)

    def is_part(self) -> bool:
        """Whether some of the segments are chosen, and not iterations or all of them."""
        return self.sample is not None or self.largest is not None


def all_segments(starts: Sequence[int], end: int) -> list[Segment]:
    """Return the segments between the states from which a replay can start, and the end."""
    borders = [*(n for n in sorted(starts) if n < end), end]
    return list(zip(borders, borders[1:], strict=False))


def around(certificate: Certificate, starts: Sequence[int], steps: Segment) -> Segment:
    """Return the smallest segment that begins at a start, ends at a state, and contains steps.

    It has at least one iteration, unless 0:0 asks for the initial state.
    """
    (first, last), end = steps, certificate.end["iteration"]
    if last > end:
        raise UserError(f"--steps {first}:{last}: expected at most {end}, the last iteration")
    states = [link["iteration"] for link in certificate.of_kind(STATE)]
    begin = max(min(first, last - 1), 0)
    return max(n for n in starts if n <= begin), min(n for n in states if n >= last)


def draw(segments: Sequence[Segment], count: int, seed: int) -> set[Segment]:
    """Return `count` segments that a seed draws, or all.

    One iteration after the other is drawn from the segments that remain, so a forger cannot hide
    most of a run in one segment without checkpoints.
    """
    remaining, drawn = list(segments), set()
    for word in keyed.words(seed, "audit", min(count, len(remaining))).tolist():
        target = word % sum(last - first for first, last in remaining)
        for segment in remaining:
            target -= segment[1] - segment[0]
            if target < 0:
                break
        remaining.remove(segment)
        drawn.add(segment)
    return drawn


def farthest(
    segments: Sequence[Segment],
    count: int,
    learnables_at: Callable[[int], Learnables | None],
    rate: Callable[[int], float],
) -> set[Segment]:
    """Return `count` segments in which the weights moved farthest for their learning rates.

    A forger who claims a jump to other weights must hide it in a segment with a large distance.

    Parameters
    ----------
    segments : sequence of (int, int)
        The segments.
    count : int
        Their number.
    learnables_at : callable
        Function that returns the learnables at an iteration, or None if they are unknown.
    rate : callable
        Function that returns the learning rate of an iteration.
    """
    distances = {}
    position, before = -1, None
    for first, last in segments:
        if position != first:
            before = learnables_at(first)
        position, now = last, learnables_at(last)
        distance = math.inf  # an unknown distance may be a large one
        if before is not None and now is not None:
            rates = math.fsum(rate(i) for i in range(first + 1, last + 1))
            distance = distance_of(before, now) / rates if rates else math.inf
        distances[first, last], before = distance, now
    return set(sorted(segments, key=lambda segment: -distances[segment])[:count])


def distance_of(before: Learnables, now: Learnables) -> float:
    """Return the Euclidean distance of two networks' learnables; inf if it is not a number."""
    if before.keys() != now.keys():
        return math.inf
    squares = [
        float(np.sum(np.square(np.subtract(now[name], before[name], dtype=np.float64))))
        for name in before
        if np.shape(before[name]) == np.shape(now[name])
    ]
    total = math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf
    return math.sqrt(total) if len(squares) == len(before) else math.inf


def adjacent(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Group segments of which each begins where the one before ends."""
    groups: list[list[Segment]] = []
    for segment in segments:
        if groups and groups[-1][-1][1] == segment[0]:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups
