"""Predict the time of a training step on any number of ranks from the record of a probe.

The probe (see `probe`) measures short training runs, messages and exchanges. A mini-batch consists
of blocks of 16 images, which the ranks share. The predicted time of a step has these parts:

- Compute: the time of the rank with the most blocks. The time is interpolated between the measured
  numbers of blocks and of computing ranks per node.
- Stragglers: at each sum that a step waits for, all N ranks wait for the slowest rank. The expected
  time of the slowest rank is the expected maximum of N measured times.
- Exchanges: simulated with the algorithm that `comm.exchange` chooses, and with the costs of
  messages that the probe measured. The probe also measured which fraction of the exchange of
  gradients overlaps with the backward pass.

Ranks that train together are slower than the sum of these parts, because they compute at the same
pace and lose cores while they wait. The probe measures the factor of this slowdown, the coupling,
on its ranks. The model applies the coupling to every number of ranks above one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpidl.comm.simulation import Link, Network
from mpidl.core import fold, keyed
from mpidl.core.blocks import blocks_of
from mpidl.performance.network_fit import NetworkFit
from mpidl.performance.trace import BUCKET, FINISH, Event

RESAMPLES = 100  # number of bootstrap samples for the error of a prediction
MANY_RANKS = 64  # with more ranks, all buckets of gradients are simulated with their mean size


@dataclass(frozen=True)
class Setting:
    """The assumptions of a prediction."""

    # Number of images per mini-batch over all ranks. Not used if `batch_per_rank` is given.
    batch_size: int
    # Number of images per mini-batch and rank for weak scaling, or None for strong scaling.
    batch_per_rank: int | None
    threads: int  # number of threads per rank
    workers: int  # number of threads per rank that read images
    ranks_per_node: int

    def images(self, ranks: int) -> int:
        """Return the number of images per mini-batch on this number of ranks."""
        return self.batch_size if self.batch_per_rank is None else self.batch_per_rank * ranks


@dataclass(frozen=True)
class Step:
    """Predicted duration of one training step in seconds, and its parts as means over the ranks."""

    seconds: float
    # Parts of the duration: computing, reading images, waiting for other ranks, and exchanges
    # that do not overlap with the backward pass.
    compute: float
    input: float
    wait: float
    sum: float


class Model:
    """A model that predicts the duration of a training step.

    `link` is the assumed link between nodes, by default the measured one between nodes or, if the
    probe ran on one node, inside the node. `sample` has the indices of the probe's rounds to use,
    possibly with repetitions.
    """

    def __init__(
        self,
        record: Mapping[str, Any],
        link: Link | None = None,
        sample: Sequence[int] | None = None,
    ) -> None:
        self.record, self.assumed_link = record, link
        self.sample = list(range(record["rounds"]) if sample is None else sample)
        self._medians = _medians_of(record["steps"], self.sample)
        self.levels = sorted({active for active, _ in self._medians["slowest"]})
        self.events = [Event(*event) for event in record["events"]]
        self.setting = Setting(
            record["batch_size"],
            record["batch_per_rank"],
            record["threads"],
            record["workers"],
            record["ranks_per_host"],
        )

    # compute

    @cached_property
    def _curves(self):
        """{active ranks: (`rounds_of_blocks` (sizes,), seconds (sizes, grid))}.

        Column k of the seconds is the time of the slowest of 2**k ranks.
        """
        curves, slowest = {}, self._medians["slowest"]
        for active in self.levels:
            blocks = [b for a, b in slowest if a == active]
            rounds = np.array([rounds_of_blocks(b, self.record["threads"]) for b in blocks])
            curves[active] = rounds, np.array([slowest[active, b] for b in blocks])
        return curves

    @cached_property
    def _fits(self):
        """{active ranks: (coefficients (2, grid), relative residuals)} of linear fits to curves."""
        return {active: _relative_fit(*curve) for active, curve in self._curves.items()}

    def fit(self, active: int) -> tuple[float, float]:
        """Return (seconds per step, seconds per block and thread) for `active` ranks per node."""
        coefficients, _ = self._fits[active]
        return float(coefficients[0, 0]), float(coefficients[1, 0])

    @property
    def fit_error(self) -> float:
        """Root mean square of the relative residuals of the fits."""
        return float(np.sqrt(np.mean([np.mean(r[:, 0] ** 2) for _, r in self._fits.values()])))

    def compute_seconds(
        self, blocks: int, ranks: int, setting: Setting, peers: int = 1
    ) -> tuple[float, float]:
        """Return the seconds of a step without exchanges, for one rank and for the slowest rank.

        The first result is for a rank with this number of blocks if `ranks` compute, and the second
        is the expected time of the slowest of `peers` such ranks.
        """
        rounds = rounds_of_blocks(blocks, setting.threads) if blocks else 0.0
        active = min(ranks, setting.ranks_per_node)
        times = np.array([_interpolated(rounds, *self._curves[level]) for level in self.levels])
        position = math.log2(min(max(active, 1), self.levels[-1]))
        levels = np.log2(self.levels)
        grid = np.array([np.interp(position, levels, column) for column in times.T])
        place = min(math.log2(peers), len(grid) - 1)
        return float(grid[0]), float(np.interp(place, np.arange(len(grid)), grid))

    def reading_seconds(self, blocks: int, ranks: int, setting: Setting) -> float:
        """Return the number of seconds per step that a rank waits for images."""
        active = min(ranks, setting.ranks_per_node)
        level = min(self.levels, key=lambda a: abs(math.log2(a) - math.log2(active)))
        inputs = self._medians["input"]
        table = {b: seconds for (a, b), seconds in inputs.items() if a == level}
        nearest = min(table, key=lambda b: abs(b - blocks))
        return float(table[nearest]) * max(blocks, 1) / nearest

    # exchanges

    @cached_property
    def exchanges(self) -> NetworkFit:
        """The fitted costs of messages and exchanges."""
        return NetworkFit(self.record, self.sample)

    def network(self, setting: Setting) -> Network:
        """Return the network that a prediction assumes, with `assumed_link` if it is given."""
        network = self.exchanges.network._replace(ranks_per_node=setting.ranks_per_node)
        return network if self.assumed_link is None else network._replace(between=self.assumed_link)

    # a step

    def step(self, ranks: int, setting: Setting, images: int | None = None) -> Step:
        """Predict a training step.

        `images` is the number of a smaller mini-batch, whose exchanges are assumed to take as long
        as those of a full mini-batch.
        """
        factor = self.together(ranks, self.coupling)
        return Step(*(factor * seconds for seconds in astuple(self.parts(ranks, setting, images))))

    def together(self, ranks: int, coupling: float) -> float:
        """Return the ratio of the time of a step on `ranks` ranks to the sum of its parts.

        `coupling` is this ratio on the ranks of the probe.
        """
        reach = math.log2(ranks) / math.log2(self.record["ranks"])
        return 1 + (coupling - 1) * min(reach, 1.0)

    @cached_property
    def coupled_seconds(self) -> float | None:
        """Median duration of a step if all ranks of the probe train together; None if unknown."""
        seconds = self.record["coupled"]
        return float(np.median([seconds[n] for n in self.sample])) if seconds else None

    @cached_property
    def coupling(self) -> float:
        """Measured ratio of the time of a step on all ranks to the sum of its parts."""
        if self.coupled_seconds is None:
            return 1.0
        return self.coupled_seconds / self.parts(self.record["ranks"], self.setting).seconds

    def parts(self, ranks: int, setting: Setting, images: int | None = None) -> Step:
        """Predict a step as the sum of its parts, without the coupling; see `step`."""
        full_leaves = blocks_of(setting.images(ranks))
        leaves = full_leaves if images is None else blocks_of(images)
        counts = [stop - start for start, stop in fold.split_blocks(leaves, ranks)]
        by_blocks = {b: self.compute_seconds(b, ranks, setting)[0] for b in set(counts)}
        mean = sum(by_blocks[b] for b in counts) / ranks
        blocks, peers = most_blocks(leaves, ranks)
        _, slowest = self.compute_seconds(blocks, ranks, setting, peers)
        slowest = max(slowest, by_blocks[blocks])
        speedup = setting.workers / self.setting.workers
        reading = self.reading_seconds(blocks, ranks, setting)
        reading = min(reading, 0.9 * mean)
        saved = reading * (1 - 1 / speedup)
        mean, slowest, reading = mean - saved, slowest - saved, reading - saved
        sums = self._sum_seconds(ranks, full_leaves, blocks, slowest, setting)
        return Step(slowest + sums, mean - reading, reading, slowest - mean, sums)

    def _sum_seconds(self, ranks, leaves, blocks, compute, setting):
        """Return the number of seconds that exchanges add to the computation of a step."""
        if ranks == 1:
            return 0.0
        network, places = self.network(setting), self._places(blocks, ranks)
        events = self.events
        if ranks > MANY_RANKS:
            events = _with_mean_buckets(events)
        clock = link_free = previous = 0.0
        for event, place in zip(events, places, strict=True):
            clock += (place - previous) * compute
            previous = place
            if event.kind == FINISH:
                clock = max(clock, link_free)
                continue
            seconds = self.exchanges.seconds(event, ranks, leaves, network)
            if event.kind == BUCKET:
                # One part of the exchange uses the processor and delays the backward pass. The rest
                # overlaps with the backward pass.
                packing = event.width * event.itemsize * self.record["copy_seconds_per_byte"]
                clock += packing
                link_free = max(clock, link_free) + seconds
                clock += (1 - self.exchanges.hidden) * seconds
            else:
                clock += seconds
        return clock + (1 - previous) * compute - compute

    def _places(self, blocks, ranks):
        """Return when the events happen in a step, from 0 (start) to 1 (end).

        The times were measured with about the given number of blocks.
        """
        level = min(self.levels, key=lambda a: abs(a - ranks))
        counts = [b for a, b in self._medians["places"] if a == level]
        nearest = min(counts, key=lambda b: abs(math.log2(b) - math.log2(max(blocks, 1))))
        return self._medians["places"][level, nearest]

    def epoch_seconds(self, ranks: int, setting: Setting) -> float:
        """Predict the duration of one epoch in seconds. The last mini-batch may be smaller.

        The duration includes the time to read the first mini-batch before the first step.
        """
        total, batch = self.record["images"], setting.images(ranks)
        seconds = (total // batch) * self.step(ranks, setting).seconds if total >= batch else 0.0
        rest = total % batch
        seconds += self.step(ranks, setting, rest).seconds if rest else 0.0
        first_blocks, _ = most_blocks(blocks_of(min(batch, total)), ranks)
        speedup = setting.workers / self.setting.workers
        return seconds + first_blocks * self.record["reading_seconds_per_block"] / speedup

    def images_per_second(self, ranks: int, setting: Setting) -> float:
        """Predict the training speed in images per second."""
        return self.record["images"] / self.epoch_seconds(ranks, setting)

    def resampled(self) -> list[Model]:
        """Return models of bootstrap samples of the probe's rounds.

        Every call returns the same models.
        """
        rounds = self.record["rounds"]
        uniform = keyed.uniform(0, "bootstrap of a probe", RESAMPLES * rounds)
        samples = (uniform.reshape(RESAMPLES, rounds) * rounds).astype(int)
        return [Model(self.record, self.assumed_link, sample) for sample in samples.tolist()]


def _medians_of(steps, sample):
    """Return {name: {(active ranks, blocks): median of the values over the rounds in `sample`}}."""
    by_kind: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for step in sorted(steps, key=lambda s: (s["active"], s["blocks"], s["round"])):
        by_kind.setdefault((step["active"], step["blocks"]), []).append(step)
    return {
        name: {
            kind: np.median([steps[number][name] for number in sample], axis=0)
            for kind, steps in by_kind.items()
        }
        for name in ("slowest", "input", "places")
    }


def most_blocks(leaves: int, ranks: int) -> tuple[int, int]:
    """Return the largest number of blocks on a rank, and how many ranks have this number of blocks.

    `leaves` is the number of blocks that the ranks share.
    """
    blocks = -(-leaves // ranks)
    return blocks, leaves - (blocks - 1) * ranks


def rounds_of_blocks(blocks: int, threads: int) -> float:
    """Return how many blocks the thread with the most work computes.

    If there are fewer blocks than threads, several threads divide a block, and the result is a
    fraction.
    """
    return blocks / threads if blocks < threads else float(-(-blocks // threads))


def _interpolated(x, places, values):
    """Interpolate the rows of `values` linearly at x, or extrapolate with the slope at an end."""
    if len(places) == 1:
        return values[0] * x / places[0]
    right = int(np.clip(np.searchsorted(places, x), 1, len(places) - 1))
    slope = (values[right] - values[right - 1]) / (places[right] - places[right - 1])
    if x < places[0]:
        return np.maximum(values[0] + np.maximum(slope, 0) * (x - places[0]), 0)
    if x > places[-1]:
        return values[-1] + np.maximum(slope, 0) * (x - places[-1])
    return values[right] + slope * (x - places[right])


def _relative_fit(rounds, times):
    """Fit times (sizes, grid) by a + b * rounds, and return (coefficients, relative residuals).

    Both coefficients are at least 0. Every size has the same relative weight.
    """
    # Least squares of (a + b * rounds) / times - 1, in closed form for each column of the grid.
    constant, slope = 1 / times, rounds[:, None] / times
    aa, ab, bb = (constant**2).sum(0), (constant * slope).sum(0), (slope**2).sum(0)
    a1, b1 = constant.sum(0), slope.sum(0)
    determinant = aa * bb - ab**2
    is_single = len(set(rounds)) == 1
    a = np.zeros_like(a1) if is_single else (a1 * bb - b1 * ab) / determinant
    b = b1 / bb if is_single else (b1 * aa - a1 * ab) / determinant
    a, b = np.where(a < 0, 0, a), np.where(a < 0, b1 / bb, b)
    a, b = np.where(b < 0, a1 / aa, a), np.maximum(b, 0)
    return np.array([a, b]), (a + b * rounds[:, None]) / times - 1


def _with_mean_buckets(events):
    """Replace all buckets by buckets of their mean size, which take about as long in total."""
    buckets = [event for event in events if event.kind == BUCKET]
    if not buckets:
        return events
    width = round(sum(event.width for event in buckets) / len(buckets))
    return [event._replace(width=width) if event.kind == BUCKET else event for event in events]
