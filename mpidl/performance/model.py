"""Predict the time of a training step on any number of ranks from the record of a probe.

The time of a step has these parts:

- compute: a linear function of the blocks of the rank with most blocks, fitted to the probe, for
  each number of ranks that compute on a node at the same time;
- stragglers: at each sum that a step waits for, all ranks wait for the slowest, whose expected time
  is that of the largest of N measured ones;
- exchanges: simulated with the algorithm that `comm.exchange` chooses for the layout, by the costs
  of messages that the probe measured. The part of the gradients' exchange that backward hides is
  measured too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mpidl import fold, keyed
from mpidl.blocks import blocks_of
from mpidl.performance.network_fit import NetworkFit
from mpidl.performance.simulation import Link, Network
from mpidl.performance.trace import BUCKET, FINISH, SUM, Event

RESAMPLES = 100
NINETY_PERCENT = 1.645  # half-width of the central 90 % of a normal distribution, in deviations
MANY_RANKS = 64  # above, the buckets of a step are simulated with their mean size


@dataclass(frozen=True)
class Setting:
    """What a prediction assumes.

    Attributes
    ----------
    batch_size : int
        Images per mini-batch over all ranks. Not used if `batch_per_rank` is given.
    batch_per_rank : int or None
        Images per mini-batch and rank, for weak scaling.
    threads : int
        Threads per rank.
    workers : int
        Threads per rank that read images.
    ranks_per_node : int
        Ranks that share a node.
    has_global_sums : bool
        Whether the step waits for sums of batch normalization.
    """

    batch_size: int
    batch_per_rank: int | None
    threads: int
    workers: int
    ranks_per_node: int
    has_global_sums: bool = True

    def images(self, ranks: int) -> int:
        """Return the images per mini-batch on this number of ranks."""
        return self.batch_size if self.batch_per_rank is None else self.batch_per_rank * ranks


@dataclass(frozen=True)
class Step:
    """Predicted seconds of one training step, as means over the ranks.

    Attributes
    ----------
    seconds : float
        Duration of the step.
    compute, input, wait, sum : float
        Parts of the duration: kernels and Python, reading images, waiting for other ranks, and
        exchanges that backward does not hide.
    """

    seconds: float
    compute: float
    input: float
    wait: float
    sum: float


class Model:
    """The model of a training step.

    Parameters
    ----------
    record : mapping
        The result of `probe.measure`.
    link : Link, optional
        Assumed link between nodes. By default the measured one or, if the probe ran on one node,
        the link inside the node.
    sample : sequence of int, optional
        Rounds of the probe to use, with repetitions. By default each round once.
    """

    def __init__(
        self,
        record: Mapping[str, Any],
        link: Link | None = None,
        sample: Sequence[int] | None = None,
    ) -> None:
        self.record, self.assumed_link = record, link
        rounds = range(record["rounds"])
        self.sample = list(rounds if sample is None else sample)
        self._tables: dict[str, np.ndarray] = {}  # shared with resampled models
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
    def _kinds(self):
        """(active ranks, blocks) of the turns of a round, in order."""
        return sorted({(step["active"], step["blocks"]) for step in self.record["steps"]})

    def _medians(self, name):
        """Return {(active ranks, blocks): median of a value of the turns} over the sample."""
        if name not in self._tables:
            by_kind = {
                (s["active"], s["blocks"], s["round"]): s[name] for s in self.record["steps"]
            }
            self._tables[name] = np.array(
                [
                    [by_kind[(*kind, number)] for number in range(self.record["rounds"])]
                    for kind in self._kinds
                ]
            )
        medians = np.median(self._tables[name][:, self.sample], axis=1)
        return dict(zip(self._kinds, medians, strict=True))

    @cached_property
    def _slowest(self):
        return self._medians("slowest")

    @cached_property
    def _inputs(self):
        return self._medians("input")

    @cached_property
    def _all_places(self):
        return self._medians("places")

    @cached_property
    def levels(self) -> list[int]:
        """Numbers of ranks per node that computed at the same time, in order."""
        return sorted({active for active, _ in self._kinds})

    @cached_property
    def _fits(self):
        """{active ranks: (coefficients (2, grid), relative residuals)} of the linear fits."""
        threads, fits = self.record["threads"], {}
        for active in self.levels:
            blocks = [b for a, b in self._kinds if a == active]
            times = np.array([self._slowest[active, b] for b in blocks])
            rounds = np.array([rounds_of_blocks(b, threads) for b in blocks])
            fits[active] = _relative_fit(rounds, times)
        return fits

    def fit(self, active: int) -> tuple[float, float]:
        """Return (seconds per step, seconds per block and thread) with `active` ranks per node."""
        coefficients, _ = self._fits[active]
        return float(coefficients[0, 0]), float(coefficients[1, 0])

    @property
    def fit_error(self) -> float:
        """Root mean square of the relative residuals of the fits."""
        return float(np.sqrt(np.mean([np.mean(r[:, 0] ** 2) for _, r in self._fits.values()])))

    def compute_seconds(self, blocks: int, ranks: int, setting: Setting) -> tuple[float, float]:
        """Return the seconds of a step without exchanges, of one rank and of the slowest of all.

        Parameters
        ----------
        blocks : int
            Blocks of the rank.
        ranks : int
            Number of ranks, among which the slowest is sought.
        setting : Setting
            Threads per rank and ranks per node.
        """
        rounds = rounds_of_blocks(blocks, setting.threads) if blocks else 0.0
        active = min(ranks, setting.ranks_per_node)
        times = np.array([[1, rounds] @ self._fits[level][0] for level in self.levels])
        position = math.log2(min(max(active, 1), self.levels[-1]))
        levels = np.log2(self.levels)
        grid = np.array([np.interp(position, levels, column) for column in times.T])
        place = min(math.log2(ranks), len(grid) - 1)
        return float(grid[0]), float(np.interp(place, np.arange(len(grid)), grid))

    def reading_seconds(self, blocks: int, ranks: int, setting: Setting) -> float:
        """Return the seconds of a step in which a rank waits for images."""
        active = min(ranks, setting.ranks_per_node)
        level = min(self.levels, key=lambda a: abs(math.log2(a) - math.log2(active)))
        table = {b: seconds for (a, b), seconds in self._inputs.items() if a == level}
        nearest = min(table, key=lambda b: abs(b - blocks))
        return float(table[nearest]) * max(blocks, 1) / nearest

    # exchanges

    @cached_property
    def exchanges(self) -> NetworkFit:
        """The fitted costs of messages and exchanges."""
        return NetworkFit(self.record, self.sample)

    def network(self, setting: Setting) -> Network:
        """Return the network of a prediction."""
        network = self.exchanges.network._replace(ranks_per_node=setting.ranks_per_node)
        return network if self.assumed_link is None else network._replace(between=self.assumed_link)

    # a step

    def step(self, ranks: int, setting: Setting, images: int | None = None) -> Step:
        """Predict a training step.

        Parameters
        ----------
        ranks : int
            Number of ranks.
        setting : Setting
            What the prediction assumes.
        images : int, optional
            Images of a smaller mini-batch, whose exchanges count as those of a full one.
        """
        full_leaves = blocks_of(setting.images(ranks))
        leaves = full_leaves if images is None else blocks_of(images)
        counts = [stop - start for start, stop in fold.split_blocks(leaves, ranks)]
        by_blocks = {b: self.compute_seconds(b, ranks, setting)[0] for b in set(counts)}
        mean = sum(by_blocks[b] for b in counts) / ranks
        _, slowest = self.compute_seconds(max(counts), ranks, setting)
        slowest = max(slowest, by_blocks[max(counts)])
        speedup = setting.workers / self.setting.workers
        reading = self.reading_seconds(max(counts), ranks, setting)
        reading = min(reading, 0.9 * mean)
        saved = reading * (1 - 1 / speedup)
        mean, slowest, reading = mean - saved, slowest - saved, reading - saved
        sums = self._sum_seconds(ranks, full_leaves, max(counts), slowest, setting)
        return Step(slowest + sums, mean - reading, reading, slowest - mean, sums)

    def _sum_seconds(self, ranks, leaves, blocks, compute, setting):
        """Return the seconds that exchanges add to the computation of a step."""
        if ranks == 1:
            return 0.0
        network, places = self.network(setting), self._places(blocks, ranks)
        events = self.events
        if not setting.has_global_sums:
            last = max(i for i, event in enumerate(events) if event.kind == SUM)
            is_loss = [i == last or e.kind != SUM for i, e in enumerate(events)]
            places = [place for place, is_kept in zip(places, is_loss, strict=True) if is_kept]
            events = [event for event, is_kept in zip(events, is_loss, strict=True) if is_kept]
        if ranks > MANY_RANKS:
            events = _with_mean_buckets(events)
        clock = link_free = previous = 0.0
        for event, place in zip(events, places, strict=True):
            clock += (place - previous) * compute
            previous = place
            if event.kind == FINISH:
                clock = max(clock, link_free)
                continue
            seconds = self.exchanges.simulated(event, ranks, leaves, network)
            if event.kind == BUCKET:
                # The processor's part of the exchange delays backward; the rest runs beside it.
                packing = event.width * event.itemsize * self.record["copy_seconds_per_byte"]
                clock += packing
                link_free = max(clock, link_free) + seconds
                clock += (1 - self.exchanges.hidden) * seconds
            else:
                clock += seconds
        return clock + (1 - previous) * compute - compute

    def _places(self, blocks, ranks):
        """Return the places of the events in a step, as measured with about as many blocks."""
        counts = {b for _, b in self._kinds}
        nearest = min(counts, key=lambda b: abs(math.log2(b) - math.log2(max(blocks, 1))))
        level = min(self.levels, key=lambda a: abs(a - ranks))
        return self._all_places[level, nearest]

    def epoch_seconds(self, ranks: int, setting: Setting) -> float:
        """Predict the seconds of one epoch, whose last mini-batch may be smaller."""
        total, batch = self.record["images"], setting.images(ranks)
        seconds = (total // batch) * self.step(ranks, setting).seconds if total >= batch else 0.0
        rest = total % batch
        return seconds + (self.step(ranks, setting, rest).seconds if rest else 0.0)

    def images_per_second(self, ranks: int, setting: Setting) -> float:
        """Predict the images per second of a training."""
        return self.record["images"] / self.epoch_seconds(ranks, setting)

    def resampled(self) -> list[Model]:
        """Return models of resampled rounds of the probe, always the same ones."""
        rounds = self.record["rounds"]
        uniform = keyed.uniform(0, "bootstrap of a probe", RESAMPLES * rounds)
        samples = (uniform.reshape(RESAMPLES, rounds) * rounds).astype(int)
        self._medians("slowest")
        models = [Model(self.record, self.assumed_link, sample) for sample in samples.tolist()]
        for model in models:
            model._tables = self._tables
        return models


class Error:
    """The error of the predictions of a model.

    Exchanges are not simulated again for each resampled model: their times are scaled by the
    measured times of the rounds.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.models = model, model.resampled()
        total = sum(model.exchanges.fold_seconds.values())
        self.factors = [sum(m.exchanges.fold_seconds.values()) / total for m in self.models]

    def relative(self, ranks: int, setting: Setting) -> tuple[float, float]:
        """Return the half-widths of the central 90 % of the speed and of the efficiency.

        Both are relative. The efficiency on one rank is 1 by definition.
        """
        model = self.model
        step = model.step(ranks, setting)
        systematic = NINETY_PERCENT * np.hypot(
            model.fit_error, model.exchanges.fold_error * step.sum / step.seconds
        )
        times = [
            self._seconds(m, ranks, setting) + factor * step.sum
            for m, factor in zip(self.models, self.factors, strict=True)
        ]
        one_rank = [self._seconds(m, 1, setting) for m in self.models]
        speed, efficiency = (
            float(np.hypot(_half_width(values), systematic))
            for values in (times, np.divide(times, one_rank))
        )
        return speed, 0.0 if ranks == 1 else efficiency

    @staticmethod
    def _seconds(model, ranks, setting):
        blocks = -(-blocks_of(setting.images(ranks)) // ranks)
        return max(model.compute_seconds(blocks, ranks, setting))


def _half_width(values):
    """Return half the range of the central 90 % of values, relative to their median."""
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    return (high - low) / 2 / middle


def rounds_of_blocks(blocks: int, threads: int) -> float:
    """Return how many blocks the thread with most work computes; threads share a single block."""
    return blocks / threads if blocks < threads else float(-(-blocks // threads))


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
    """Replace the buckets by buckets of their mean size, which take as long together."""
    buckets = [event for event in events if event.kind == BUCKET]
    if not buckets:
        return events
    width = round(sum(event.width for event in buckets) / len(buckets))
    return [event._replace(width=width) if event.kind == BUCKET else event for event in events]


def variants(setting: Setting, has_sums: bool, input_share: float) -> dict[str, Setting]:
    """Return {options: setting} of the options that may move the point where scaling stops."""
    changed: dict[str, Setting] = {}
    if setting.batch_per_rank is None:
        for factor in (2, 4):
            size = factor * setting.batch_size
            changed[f"--batch-size {size}"] = replace(setting, batch_size=size)
    else:
        size = 2 * setting.batch_per_rank
        changed[f"--batch-per-rank {size}"] = replace(setting, batch_per_rank=size)
    if setting.ranks_per_node > 1:
        threads, ranks = 2 * setting.threads, max(1, setting.ranks_per_node // 2)
        changed[f"--threads {threads}"] = replace(setting, threads=threads, ranks_per_node=ranks)
    if input_share > 0.1:
        workers = 2 * setting.workers
        changed[f"--workers {workers}"] = replace(setting, workers=workers)
    if has_sums:
        changed["--batchnorm local"] = replace(setting, has_global_sums=False)
    return changed
